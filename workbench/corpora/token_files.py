"""Files that hold tokens already: .npy, raw integers, and Megatron-LM's .bin with its .idx."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from workbench.corpora.megatron_files import IndexedTokens, read_indexed
from workbench.errors import refuse
from workbench.plan.corpus_files import SourceFiles
from workbench.safe_io.files import unread

CHUNK = 2**24
"""Tokens that are looked at together."""


def open_tokens(of: SourceFiles) -> IndexedTokens:
    """Map the tokens of a source; .npy and raw tokens are one document.

    Raises:
        PlanError: The file cannot be read, is damaged, or holds no integers; names the field.
    """
    path = of.paths[0]
    try:
        if of.format == "megatron":
            return read_indexed(path)
        tokens = _npy(path) if of.format == "npy" else _raw(path, of.dtype or "")
    except OSError as error:
        raise refuse(f"{of.where}.source", f"{path} cannot be read: {unread(error)}") from None
    except ValueError as error:
        raise refuse(f"{of.where}.source", " ".join(str(error).split())) from None
    alone = np.array([0, len(tokens)])
    return IndexedTokens(tokens, alone, alone)


def check_tokens(found: IndexedTokens, vocab: int, of: SourceFiles) -> None:
    """Refuse ids that the model does not have.

    Raises:
        PlanError: Naming the file, the first such token and its place.
    """
    for start in range(0, len(found.tokens), CHUNK):
        chunk = found.tokens[start : start + CHUNK]
        wrong = (chunk >= vocab) | (chunk < 0)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise refuse(
                f"{of.where}.source",
                f"{of.paths[0]}: token {start + at} is {chunk[at]}, the model has a vocabulary of "
                f"{vocab}; legal: 0 to {vocab - 1}, of the model's own tokenizer",
            )


def ended_by(tokens: np.ndarray, end: int) -> np.ndarray:
    """The first token of each document, where the token `end` is the last of each; int64."""
    found = [np.zeros(1, np.int64)]
    for start in range(0, len(tokens) - 1, CHUNK):  # one after the last token begins nothing
        chunk = tokens[start : min(start + CHUNK, len(tokens) - 1)]
        found.append(np.flatnonzero(chunk == end) + start + 1)
    return np.concatenate(found)


def _npy(path: Path) -> np.ndarray:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no intact .npy file: {error}") from None
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        held = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else "more"
        raise ValueError(f"{path} holds {held}; legal: one dimension of integers")
    return tokens


def _raw(path: Path, dtype: str) -> np.ndarray:
    kind, size = np.dtype(dtype).newbyteorder("<"), path.stat().st_size
    if size % kind.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, which {kind.itemsize} does not divide, the bytes of "
            f"{dtype}; it is truncated, or of another dtype"
        )
    return np.memmap(path, kind, mode="r") if size else np.empty(0, kind)
