"""Reading of safetensors files by `pread`, a slice at a time.

The safetensors library maps a file into memory: every page that a rank touches then counts as its
memory until the file is closed, as much again as the weights that it holds. Reading copies what is
wanted into a buffer that lives as long as the slice.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.checkpoint.manifest import REMEDY
from workbench.checkpoint.safetensors_writer import TORCH_DTYPES
from workbench.untrusted_text import shown

MAX_HEADER_BYTES = 100_000_000
"""Longest header of the format (https://github.com/huggingface/safetensors)."""
DTYPE_BYTES = {
    **{name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()},
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16"), 2),
    **dict.fromkeys(("I32", "U32"), 4),
    **dict.fromkeys(("I64", "U64"), 8),
}

READ_DTYPES = {**TORCH_DTYPES, "F8_E4M3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class FileEntry:
    """Where in a file a tensor is: from byte `start` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int


def read_header(path: Path, remedy: str = REMEDY) -> dict[str, FileEntry]:
    """The tensors of a file by name, in the order of their bytes.

    Args:
        path: The file.
        remedy: What to do about a damaged one, for messages.

    Raises:
        ValueError: The file cannot be read, is cut short, or has no well-formed header.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            nbytes = int.from_bytes(file.read(8), "little")
            content = (
                file.read(nbytes) if size >= 8 + nbytes and nbytes <= MAX_HEADER_BYTES else b""
            )
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {remedy}") from None
    try:
        if size < 8 or len(content) != nbytes:
            raise _Damage(f"it has {size} bytes and announces a header of {nbytes}")
        return _entries(content, 8 + nbytes, size)
    except _Damage as damage:
        raise ValueError(f"{path} is damaged: {damage}; {remedy}") from None


class _Damage(Exception):
    """What is wrong with a file."""


def _entries(content: bytes, begin: int, size: int) -> dict[str, FileEntry]:
    try:
        header = json.loads(content, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError):
        raise _Damage("its header is no JSON") from None
    if not isinstance(header, dict):
        raise _Damage("its header is no object")
    header.pop("__metadata__", None)
    spans = {key: _span(key, described) for key, described in header.items()}
    at, before, found = 0, "the header", {}
    for key, (dtype, shape, start, stop) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if start != at:
            raise _Damage(f"{key} begins at byte {start} of the data, {before} ends at {at}")
        at, before = stop, key
        found[key] = FileEntry(dtype, shape, begin + start)
    if begin + at != size:
        raise _Damage(f"it has {size} bytes, {before} ends at byte {begin + at}")
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Damage("its header has a name twice")
    return found


def _span(key: str, described: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, start, stop) of a tensor."""
    try:
        dtype, shape, (start, stop) = (described[k] for k in ("dtype", "shape", "data_offsets"))
        sound = type(dtype) is str and all(type(n) is int and n >= 0 for n in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound or start > stop:
        raise _Damage(f"its header does not give dtype, shape and data_offsets of {key}")
    if dtype in DTYPE_BYTES and (needs := math.prod(shape) * DTYPE_BYTES[dtype]) != stop - start:
        raise _Damage(f"{key}, {dtype} {list(shape)}, takes {needs} bytes and has {stop - start}")
    return dtype, tuple(shape), start, stop


class SafetensorsFile:
    """An open file with the interface of `safetensors.safe_open`, as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path, self.entries = path, read_header(path)
        self.descriptor = os.open(path, os.O_RDONLY)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def position(self, key: str) -> int:
        """Where in the file a tensor begins, for reading in order."""
        return self._entry(key).start

    def get_slice(self, key: str) -> SafetensorsSlice:
        """A tensor of which only slices are read. Raises ValueError where its dtype is not one."""
        entry = self._entry(key)
        if entry.dtype not in READ_DTYPES:
            legal = ", ".join(READ_DTYPES)
            raise ValueError(f"{self.path}: {key} is {shown(entry.dtype)}; legal: {legal}")
        return SafetensorsSlice(self.path, self.descriptor, entry)

    def get_tensor(self, key: str) -> Tensor:
        """A complete tensor."""
        entry = self._entry(key)
        return self.get_slice(key)[tuple(slice(0, n) for n in entry.shape)]

    def _entry(self, key: str) -> FileEntry:
        if key not in self.entries:
            raise ValueError(f"{self.path} is damaged: it has no {key}; {REMEDY}")
        return self.entries[key]


@dataclass(frozen=True)
class SafetensorsSlice:
    """A tensor of an open file; indexing reads."""

    path: Path
    descriptor: int
    entry: FileEntry

    def get_shape(self) -> list[int]:
        """The tensor's shape."""
        return list(self.entry.shape)

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        """The slice, in the stored dtype.

        Complete rows of the outermost dim that has several are read: those of the disk's pages
        that a slice of columns does not need are, in tensor parallelism, another rank's.

        Raises:
            ValueError: The file is cut short, or cannot be read.
        """
        shape, dtype, start = self.entry.shape, READ_DTYPES[self.entry.dtype], self.entry.start
        lead = 0
        while lead + 1 < len(shape) and slices[lead].stop - slices[lead].start == 1:
            start += slices[lead].start * math.prod(shape[lead + 1 :]) * dtype.itemsize
            lead += 1
        inner = shape[lead + 1 :]
        rows = range(slices[lead].start, slices[lead].stop) if shape else range(1)
        buffer = torch.empty((len(rows), *inner), dtype=dtype)
        self._read(buffer, start + rows.start * math.prod(inner) * dtype.itemsize)
        if not shape:
            return buffer.reshape(())
        part = buffer[(slice(None), *slices[lead + 1 :])]
        return part.reshape([1] * lead + list(part.shape)) if lead else part

    def _read(self, buffer: Tensor, start: int) -> None:
        into, done = buffer.view(-1).view(torch.uint8).numpy().data, 0
        while done < len(into):
            try:
                count = os.preadv(self.descriptor, [into[done:]], start + done)
            except OSError as error:
                raise ValueError(
                    f"{self.path} cannot be read: {error.strerror}; {REMEDY}"
                ) from None
            if not count:
                raise ValueError(
                    f"{self.path} is damaged: it ends at byte {start + done}; {REMEDY}"
                )
            done += count
