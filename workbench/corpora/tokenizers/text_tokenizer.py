"""The tokenizer of a corpus: a tokenizer.json, or that of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from workbench.corpora.bounded_child import StrangerError, tokenizer_errors
from workbench.corpora.tokenizers.gguf_tokenizer import read_gguf_tokenizer
from workbench.errors import refuse
from workbench.safe_io.files import unread
from workbench.safe_io.gguf_files import SUFFIX
from workbench.untrusted_text import shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

USUAL_ENDS = ("<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""End-of-text tokens that are looked for where neither the plan nor tokenizer_config.json says
one."""

MOST_TOKENS = 2**24
"""Ids below which a vocabulary must end: writing it takes time and memory for each id that it
skips, and the largest vocabularies have about 2**18.
"""


def load_tokenizer(path: Path, field: str = "corpus.tokenizer") -> Tokenizer:
    """The tokenizer of a tokenizer.json or GGUF file. Raises `PlanError` naming `field`."""
    if path.suffix == SUFFIX:
        return read_gguf_tokenizer(path, field).tokenizer
    try:
        return tokenizer_of(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(field, f"{path} cannot be read: {unread(error)}") from None
    except StrangerError as error:
        raise refuse(
            field, f"{path} is no tokenizer of the `tokenizers` library: {error}"
        ) from None


def tokenizer_of(written: str) -> Tokenizer:
    """The tokenizer that the text of a tokenizer.json says. Raises `StrangerError`."""
    from tokenizers import Tokenizer

    with tokenizer_errors():
        found = Tokenizer.from_str(written)
    # Some are saved as they were called last; as transformers, every text counts whole.
    found.no_truncation()
    found.no_padding()
    if (size := vocabulary_size(found)) > MOST_TOKENS:
        words = f"has token id {size - 1:,}; legal: below {MOST_TOKENS:,}"
        raise StrangerError("tokenizer", words)
    return found


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Number of ids: one more than the largest, for a vocabulary may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def end_token(path: Path, tokenizer: Tokenizer, asked: str | None) -> int:
    """Id of the end-of-text token: the plan's, else that of the GGUF file or of the
    tokenizer_config.json beside it, else a usual one.

    Raises:
        PlanError: The tokenizer does not have it, or none is known.
    """
    if asked is not None:
        found = tokenizer.token_to_id(asked)
        if found is None:
            raise refuse("corpus.end_of_text", f"is {shown(asked)}, which {path} does not have")
        return int(found)
    names = [*_named_end(path), *USUAL_ENDS]
    for name in names:
        if (found := tokenizer.token_to_id(name)) is not None:
            return int(found)
    raise refuse(
        "corpus.end_of_text",
        f"is needed: {path} has none of {', '.join(names)}; legal: one of its tokens",
    )


def control_tokens(tokenizer: Tokenizer) -> list[str]:
    """Texts of the tokens that are no text, such as the one that ends an answer."""
    return [each.content for each in tokenizer.get_added_tokens_decoder().values() if each.special]


def _named_end(path: Path) -> list[str]:
    if path.suffix == SUFFIX:
        special = read_gguf_tokenizer(path).special
        return [special["eos_token"]] if "eos_token" in special else []
    try:
        found = orjson.loads(path.with_name("tokenizer_config.json").read_bytes())["eos_token"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    found = found.get("content") if isinstance(found, dict) else found
    return [found] if isinstance(found, str) else []
