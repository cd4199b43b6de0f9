"""Two page-locked buffers of bounded size between pageable host memory and the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from workbench.copy_stream import CopyStream
from workbench.parallel.data.offload.host_arena import host_zeros
from workbench.runtime_facts.offload_sizes import STAGING_BYTES


class HostStaging:
    """Copies between host and device in pieces, cast by the host: one buffer is filled while the
    other is on its way (ZeRO-Infinity's pinned buffers, 2104.07857, section 6.3).

    Args:
        device: The rank's.
        copies: The stream of copies.
    """

    def __init__(self, device: torch.device, copies: CopyStream) -> None:
        self._copies = copies
        self.buffers = [host_zeros(STAGING_BYTES, torch.uint8, device) for _ in range(2)]
        self._free: list[Callable[[], None] | None] = [None, None]
        """Waits until the device has read a buffer."""
        self._next = 0

    def to_device(self, device: Tensor, host: Tensor) -> None:
        """Start to copy `host` [n] to `device` [n], rounded to its dtype; on the copies' stream."""
        for into, piece in _pieces(device, host):
            index, self._next = self._next, 1 - self._next
            if (wait := self._free[index]) is not None:
                wait()
            staged = self.buffers[index][: into.nbytes].view(into.dtype).copy_(piece)
            into.copy_(staged, non_blocking=True)
            self._free[index] = self._copies.host_wait()

    def to_host(self, host: Tensor, device: Tensor) -> None:
        """Copy `device` [n] to `host` [n], and wait for it."""
        for piece, into in _pieces(device, host):
            into.copy_(self.buffers[0][: piece.nbytes].view(piece.dtype).copy_(piece))


def _pieces(device: Tensor, host: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    size = STAGING_BYTES // device.element_size()
    return zip(device.split(size), host.split(size))
