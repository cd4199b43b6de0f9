"""safetensors files written as their tensors come: no more than one is in memory beside what the
caller holds.

The library writes a file from tensors that are all there, and hashes nothing. The format is small:
the header's length (8 bytes, little-endian), the header as JSON, then the tensors' bytes
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
"""What the format calls the dtypes that are kept."""
TORCH_DTYPES = {word: dtype for dtype, word in SAFETENSORS_DTYPES.items()}
BLOCK_BYTES = 32 * 2**20
"""Bytes written and hashed at once: after each the writer has shown that its disk answers."""
MAX_DIRTY_BYTES = 8 * BLOCK_BYTES
"""Bytes that may wait in the kernel for the disk: more would be waited for in silence at the file's
end.
"""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: Path,
    entries: Sequence[TensorEntry],
    tensor_of: Callable[[str], Tensor],
    wrote: Callable[[int], None] = lambda nbytes: None,
) -> tuple[int, str]:
    """Write the file, asking `tensor_of(key)` for one tensor after the other, on any device; (its
    bytes, its sha256).

    The checksum is of what was to be written, so that it tells what the disk made of it. `wrote` is
    told of every block. Wide dtypes come first, so that all are aligned. Raises OSError where the
    disk refuses.
    """
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.key))
    digest, size, kept = hashlib.sha256(), 0, 0
    with path.open("wb") as file:
        for block in _blocks(ordered, tensor_of):
            file.write(block)
            digest.update(block)
            size += len(block)
            if size - kept > MAX_DIRTY_BYTES:
                file.flush()
                os.fdatasync(file.fileno())
                kept = size
            wrote(len(block))
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _blocks(
    entries: Sequence[TensorEntry], tensor_of: Callable[[str], Tensor]
) -> Iterator[bytes | memoryview]:
    yield _header(entries)
    for entry in entries:
        tensor = tensor_of(entry.key)
        assert (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape), (
            entry,
            tensor.dtype,
            tensor.shape,
        )
        content = memoryview(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        )
        for start in range(0, len(content), BLOCK_BYTES):
            yield content[start : start + BLOCK_BYTES]


def _header(entries: Sequence[TensorEntry]) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        described[entry.key] = {
            "dtype": SAFETENSORS_DTYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
