"""Host memory of offload, beside torch's allocators.

Torch's own pinned allocator rounds to a power of two, which would take up to twice the memory of
the largest tensors there are; and on a CPU rank, its allocator could not tell the host's tensors
from the device's. Pages of the operating system are neither: they take what they hold, and the
running sum of the CPU allocator is what the device would hold.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from workbench.models.torch_dispatch import FakeTensor


class _Pages(mmap.mmap):
    """Zeroed pages; `pin` makes them page-locked, for copies that a GPU makes on its own."""

    _pinned = 0

    def pin(self, address: int) -> None:
        """Page-lock the pages, which begin at `address`."""
        error = int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))
        if error:
            raise MemoryError(
                f"strategy.data.offload: {len(self) / 2**30:.2f} GiB of host memory cannot be "
                f"page-locked (CUDA error {error}); `ulimit -l` and the container bound it"
            )
        self._pinned = address

    def __del__(self) -> None:
        if self._pinned:  # before the pages go
            torch.cuda.cudart().cudaHostUnregister(self._pinned)


def host_zeros(numel: int, dtype: torch.dtype, device: torch.device, copied: bool = True) -> Tensor:
    """Zeros [numel] in host memory that no allocator of torch counts.

    Args:
        numel: Number of elements.
        dtype: Their dtype.
        device: The rank's device.
        copied: Whether `device` copies from or to it: page-locked then, if that is a GPU.

    Raises:
        MemoryError: The host has no such memory, or may not lock it.
    """
    if isinstance(torch.empty(0), FakeTensor) or numel == 0:
        return torch.zeros(numel, dtype=dtype, device="cpu")
    pages = _Pages(-1, numel * dtype.itemsize)
    zeros = torch.frombuffer(pages, dtype=dtype, count=numel)
    if copied and device.type == "cuda":
        pages.pin(zeros.data_ptr())
    return zeros
