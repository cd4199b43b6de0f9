"""Text to token ids: bytes, or a tokenizer of the `tokenizers` library."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson

from workbench.corpora.documents import decoded, documents
from workbench.corpora.pieces import Piece
from workbench.errors import refuse
from workbench.untrusted_text import shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = 256
"""Ids of byte-level tokens; byte 0 ends a document."""
USUAL_ENDS = ("<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""End-of-text tokens that are looked for where neither the plan nor tokenizer_config.json says
one."""


@dataclass(frozen=True)
class Encoding:
    """How documents become tokens."""

    tokenizer: str | None
    """Path of a tokenizer.json; None for bytes."""
    end: int
    """Token after each document."""
    vocab: int
    """Ids are below it."""
    column: str

    @property
    def dtype(self) -> np.dtype:
        """Type of stored tokens: those of Megatron's format that hold the ids."""
        return np.dtype(np.uint16 if self.vocab <= 2**16 else np.int32)


@dataclass(frozen=True)
class Encoded:
    """Tokens of a piece."""

    tokens: np.ndarray
    lengths: np.ndarray
    """int32 [documents]: tokens of each, its end of text included."""
    skipped: int
    """Documents without a token, which are left out."""
    ends: bool
    """Whether the last document ends here."""
    size: int
    """Bytes of the piece, as progress counts them."""


class Encoder:
    """Encodes pieces. Loads the tokenizer once."""

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding
        self._tokenizer = load_tokenizer(Path(encoding.tokenizer)) if encoding.tokenizer else None

    def encode(self, piece: Piece) -> Encoded:
        """Tokens of `piece`, an end-of-text token after each document that ends in it.

        Raises:
            ValueError: A row cannot be read; names the file and the row.
        """
        parts: list[np.ndarray] = []
        lengths: list[int] = []
        skipped = 0
        end = np.array([self.encoding.end] if piece.ends else [], self.encoding.dtype)
        alone = piece.format != "text" or (piece.start == 0 and piece.ends)
        for batch in documents(piece, self.encoding.column):
            for ids in self._ids(batch, piece):
                if alone and len(ids) == 0:
                    skipped += 1
                    continue
                parts += [ids, end]
                lengths.append(len(ids) + len(end))
        tokens = np.concatenate(parts) if parts else end[:0]
        sizes = np.array(lengths, np.int32)
        return Encoded(tokens, sizes, skipped, piece.ends, piece.size)

    def _ids(self, batch: list[bytes], piece: Piece) -> list[np.ndarray]:
        dtype = self.encoding.dtype
        if self._tokenizer is None:
            return [np.frombuffer(text, np.uint8).astype(dtype) for text in batch]
        texts = [decoded(text, piece) for text in batch]
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        # `array` reads a list of integers twice as fast as numpy does.
        return [np.frombuffer(array("I", one.ids), np.uint32).astype(dtype) for one in found]


def load_tokenizer(path: Path, field: str = "corpus.tokenizer") -> Tokenizer:
    """The tokenizer of a tokenizer.json. Raises `PlanError` naming `field` where it is none."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise refuse(
            field, f"{path} is no tokenizer of the `tokenizers` library: {error}"
        ) from None


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Number of ids: one more than the largest, for a vocabulary may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def end_token(path: Path, tokenizer: Tokenizer, asked: str | None) -> int:
    """Id of the end-of-text token: the plan's, else that of the tokenizer_config.json beside it,
    else a usual one.

    Raises:
        PlanError: The tokenizer does not have it, or none is known.
    """
    if asked is not None:
        found = tokenizer.token_to_id(asked)
        if found is None:
            raise refuse("corpus.end_of_text", f"is {shown(asked)}, which {path} does not have")
        return int(found)
    names = [*_configured_end(path.with_name("tokenizer_config.json")), *USUAL_ENDS]
    for name in names:
        if (found := tokenizer.token_to_id(name)) is not None:
            return int(found)
    raise refuse(
        "corpus.end_of_text",
        f"is needed: {path} has none of {', '.join(names)}; legal: one of its tokens",
    )


def _configured_end(path: Path) -> list[str]:
    try:
        found = orjson.loads(path.read_bytes())["eos_token"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    found = found.get("content") if isinstance(found, dict) else found
    return [found] if isinstance(found, str) else []
