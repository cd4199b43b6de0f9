"""Streaming safetensors writer with checksum: at most one tensor at a time is copied to the host.

The safetensors library needs all tensors at once, and does not hash. The format: the header's
length (8 bytes, little-endian), the header as JSON, then the tensors' bytes
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
"""torch dtype -> its name in the format."""
TORCH_DTYPES = {word: dtype for dtype, word in SAFETENSORS_DTYPES.items()}
BLOCK_BYTES = 32 * 2**20
"""Bytes written and hashed at once; progress is reported after each block."""
MAX_DIRTY_BYTES = 8 * BLOCK_BYTES
"""Bytes after which written data is synced: the final fsync would otherwise block for long, without
progress.
"""


@dataclass(frozen=True)
class TensorEntry:
    """Name, dtype and shape of a tensor in a file."""

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
    """Write a safetensors file. Wide dtypes come first, so that all tensors are aligned.

    Args:
        path: The file.
        entries: Its tensors.
        tensor_of: Key -> tensor, on any device; called for one tensor after the other.
        wrote: Called with the bytes of each block written.

    Returns:
        (bytes, sha256) of the content as it was meant, which reveals later damage by the disk.

    Raises:
        OSError: The disk refuses.
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
