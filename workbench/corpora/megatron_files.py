"""Megatron-LM's indexed token files: PREFIX.bin holds the tokens, PREFIX.idx where documents are.

The index is, little-endian: the magic, version 1 (int64), the dtype's code (int8), the number of
sequences and of document boundaries (int64), then the length of each sequence in tokens (int32),
its offset in bytes (int64), and the first sequence of each document (int64), closed by the number
of sequences (megatron/core/datasets/indexed_dataset.py).
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("uint8"),
    2: np.dtype("int8"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""Code of the index -> type of the tokens; 6 and 7 are floats, which no token is."""
HEADER = struct.Struct("<9sQBQQ")


class IndexedTokens(NamedTuple):
    """A memory-mapped .bin and its documents."""

    tokens: np.ndarray
    documents: np.ndarray
    """int64 [documents + 1]: the first token of each document, and the number of tokens."""
    sequences: np.ndarray
    """int64 [sequences + 1]: those of each sequence, of which a document has one or more."""


def read_indexed(path: Path) -> IndexedTokens:
    """Map `path` (.bin) by the .idx beside it.

    Raises:
        ValueError: The index is truncated, of another version, or does not match the .bin; names
            the file and the numbers.
    """
    index = path.with_suffix(".idx")
    size = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(HEADER.size)
        if len(head) < HEADER.size or head[:9] != MAGIC:
            raise ValueError(f"{index} is no index of Megatron-LM's format: it begins {head[:9]!r}")
        _, version, code, sequences, boundaries = HEADER.unpack(head)
        if version != VERSION:
            raise ValueError(f"{index} is of version {version}; legal: {VERSION}")
        if code not in DTYPES:
            raise ValueError(f"{index} names dtype {code}; legal: {', '.join(map(str, DTYPES))}")
        expected = HEADER.size + 12 * sequences + 8 * boundaries
        if size != expected:
            raise ValueError(
                f"{index} has {size} bytes, {sequences} sequences and {boundaries} document "
                f"boundaries take {expected}; it is truncated, or holds what is not read here"
            )
        lengths = np.fromfile(file, "<i4", sequences).astype(np.int64)
        pointers = np.fromfile(file, "<i8", sequences)
        documents = np.fromfile(file, "<i8", boundaries)
    return _checked(path, index, DTYPES[code], lengths, pointers, documents)


def _checked(
    path: Path,
    index: Path,
    dtype: np.dtype,
    lengths: np.ndarray,
    pointers: np.ndarray,
    documents: np.ndarray,
) -> IndexedTokens:
    if (lengths < 0).any():
        at = int(np.argmax(lengths < 0))
        raise ValueError(f"{index}: sequence {at} has {lengths[at]} tokens; legal: 0 or more")
    starts = np.concatenate([[0], np.cumsum(lengths)])
    wrong = pointers != starts[:-1] * dtype.itemsize
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"{index}: sequence {at} is at byte {pointers[at]}, the lengths before it put it at "
            f"{starts[at] * dtype.itemsize}"
        )
    held, said = path.stat().st_size, int(starts[-1]) * dtype.itemsize
    if held != said:
        raise ValueError(
            f"{path} has {held} bytes, its index says {int(starts[-1])} tokens of {dtype.name}, "
            f"{said} bytes"
        )
    last = len(lengths)
    ordered = len(documents) > 0 and documents[0] == 0 and documents[-1] == last
    if not ordered or (np.diff(documents) < 0).any():
        raise ValueError(f"{index}: its documents do not go from sequence 0 to {last} in order")
    tokens = np.memmap(path, dtype, mode="r") if said else np.empty(0, dtype)
    return IndexedTokens(tokens, starts[documents], starts)


class IndexedWriter:
    """Writes a .bin as tokens come, and its .idx at the end; memory is 4 bytes a sequence.

    Args:
        data: Path of the .bin.
        index: Path of the .idx.
        dtype: Type of the tokens.
    """

    def __init__(self, data: Path, index: Path, dtype: np.dtype) -> None:
        self.data, self.index, self.dtype = data, index, dtype
        self.count = 0
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._hash = hashlib.sha256()
        self._file = data.open("wb")

    def add(
        self, tokens: np.ndarray, lengths: np.ndarray, ends: bool = True, each: int = 1
    ) -> None:
        """Append sequences of `lengths`.

        Args:
            tokens: Of all of them.
            lengths: Tokens of each.
            ends: Whether the last document ends here, or goes on in the next call.
            each: Sequences of a document; 0: all are one.
        """
        content = np.ascontiguousarray(tokens, self.dtype).data
        self._file.write(content)
        self._hash.update(content)
        self.count += len(tokens)
        before = len(self._lengths)
        self._lengths.frombytes(np.asarray(lengths, np.int32).tobytes())
        last = len(self._lengths) + (1 if ends else 0)
        each = each or max(1, len(lengths))
        self._documents.extend(range(before + each, last, each))

    def finish(self) -> tuple[int, str]:
        """Write the index. Returns the number of documents, and the sha256 of the tokens."""
        self.close()
        sequences = len(self._lengths)
        if self._documents[-1] != sequences:
            self._documents.append(sequences)
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        lengths = np.frombuffer(self._lengths, np.int32)
        with self.index.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, code, sequences, len(self._documents)))
            lengths.astype("<i4").tofile(file)
            ends = np.cumsum(lengths, dtype=np.int64)
            ((ends - lengths) * self.dtype.itemsize).astype("<i8").tofile(file)
            np.frombuffer(self._documents, np.int64).astype("<i8").tofile(file)
        return len(self._documents) - 1, self._hash.hexdigest()

    def close(self) -> None:
        """Close the .bin; the index is not written."""
        self._file.close()
