"""Text to token ids: bytes, or a tokenizer of the `tokenizers` library."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.corpora.bounded_child import TOKENIZER, bounded, tokenizer_errors
from workbench.corpora.conversations.chat_encoder import (
    DTYPE,
    PLAIN_TEMPLATE,
    ChatEncoder,
    ChatEncoding,
)
from workbench.corpora.documents import decoded, documents
from workbench.corpora.pieces import Piece
from workbench.corpora.tokenizers.text_tokenizer import load_tokenizer, tokenizer_of
from workbench.safe_io.gguf_files import SUFFIX

BYTES = 256
"""Ids of byte-level tokens; byte 0 ends a document."""


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
    chat: ChatEncoding | None = None
    """How conversations do; None: documents are text."""
    before: Sequence[int] = ()
    """Tokens that the tokenizer puts before each document."""
    after: Sequence[int] = ()
    """Tokens that it puts after each, before `end`."""

    @property
    def own(self) -> bool:
        """True where no tokenizer or template of a stranger is used."""
        plain = self.chat is None or self.chat.template == PLAIN_TEMPLATE
        return self.tokenizer is None and plain

    @property
    def dtype(self) -> np.dtype:
        """Type of stored tokens: those of Megatron's format that hold the ids."""
        if self.chat is not None:
            return DTYPE
        return np.dtype(np.uint16 if self.vocab <= 2**16 else np.int32)


def encoding_of(data: Mapping[str, Any]) -> Encoding:
    """An encoding from what `asdict` made of it."""
    chat = data["chat"]
    return Encoding(**{**data, "chat": chat and ChatEncoding(**chat)})


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


def sent_tokenizer(encoding: Encoding) -> str | None:
    """A GGUF file's tokenizer as a tokenizer.json, which a child reads faster than the file; else
    None.
    """
    path = Path(encoding.tokenizer or "")
    return str(load_tokenizer(path).to_str()) if path.suffix == SUFFIX else None


class Encoder:
    """Encodes pieces. Loads the tokenizer once.

    Args:
        encoding: How.
        tokenizer: What `sent_tokenizer` made of it.

    Raises:
        ValueError: The tokenizer or template cannot be read.
    """

    def __init__(self, encoding: Encoding, tokenizer: str | None = None) -> None:
        self.encoding = encoding
        self._tokenizer = None
        if encoding.tokenizer is not None:
            path = Path(encoding.tokenizer)
            with bounded(TOKENIZER, path.stat().st_size):
                if tokenizer is None:
                    self._tokenizer = load_tokenizer(path)
                else:
                    self._tokenizer = tokenizer_of(tokenizer)
        self._chats = None
        if encoding.chat is not None:
            end, before, after = encoding.end, encoding.before, encoding.after
            self._chats = ChatEncoder(encoding.chat, self._tokenizer, end, before, after)

    def encode(self, piece: Piece) -> Encoded:
        """Tokens of `piece`, with what stands before each document that begins in it, and an
        end-of-text token after each that ends in it.

        Raises:
            ValueError: A row cannot be read; names the file and the row.
        """
        if self._chats is not None:
            conversations = self._chats.encode(piece)
            tokens = np.concatenate([np.empty(0, DTYPE), *conversations])
            sizes = np.array([len(one) for one in conversations], np.int32)
            return Encoded(tokens, sizes, 0, True, piece.size)
        parts: list[np.ndarray] = []
        lengths: list[int] = []
        skipped = 0
        how, begins = self.encoding, piece.format != "text" or piece.start == 0
        before = np.array(how.before if begins else [], how.dtype)
        end = np.array([*how.after, how.end] if piece.ends else [], how.dtype)
        alone = begins and piece.ends
        for batch in documents(piece, self.encoding.column):
            for ids in self._ids(batch, piece):
                if alone and len(ids) == 0:
                    skipped += 1
                    continue
                parts += [before, ids, end]
                lengths.append(len(before) + len(ids) + len(end))
        tokens = np.concatenate(parts) if parts else end[:0]
        sizes = np.array(lengths, np.int32)
        return Encoded(tokens, sizes, skipped, piece.ends, piece.size)

    def _ids(self, batch: list[bytes], piece: Piece) -> list[np.ndarray]:
        dtype = self.encoding.dtype
        if self._tokenizer is None:
            return [np.frombuffer(text, np.uint8).astype(dtype) for text in batch]
        texts = [decoded(text, piece) for text in batch]
        with bounded(TOKENIZER, sum(map(len, batch))), tokenizer_errors():
            found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            # `array` reads a list of integers twice as fast as numpy does.
            return [np.frombuffer(array("I", one.ids), np.uint32).astype(dtype) for one in found]
