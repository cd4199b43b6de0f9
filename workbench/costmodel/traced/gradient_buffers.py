"""Unsharded gradients of ZeRO-2 and 3 that are reduced after every microbatch: each bucket has a
buffer from its first gradient until it is reduced (`parallel/data/zero_shards.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.costmodel.communication.packed_buckets import PackedBucket
from workbench.costmodel.operators.allocation_tape import AllocationTape, Storage


class GradientBuffers:
    """Buffers of one stage in a backward.

    Args:
        tape: Where they are allocated.
        buckets: In the order in which they are reduced.
        element_bytes: Of a gradient.
        in_flight: Buffers that are alive at once; 0: all, until backward is over.
    """

    def __init__(
        self,
        tape: AllocationTape,
        buckets: Sequence[PackedBucket],
        element_bytes: float,
        in_flight: int,
    ) -> None:
        self.tape, self.buckets, self.in_flight = tape, buckets, in_flight
        self.element_bytes = element_bytes
        self._of = {p.name: at for at, bucket in enumerate(buckets) for p in bucket.members}
        self._pending = [len(bucket.members) for bucket in buckets]
        self._buffers: dict[int, Storage] = {}
        self._reduced: list[int] = []
        self._next = 0

    def accumulate(self, name: str) -> None:
        """Take a parameter's gradient; reduce the buckets that are complete, in their order."""
        at = self._of[name]
        if at not in self._buffers:
            size = self.buckets[at].elements * self.element_bytes
            self._buffers[at] = self.tape.allocate(size)
        self._pending[at] -= 1
        if self.in_flight:
            self._reduce_complete()

    def _reduce_complete(self) -> None:
        while self._next < len(self.buckets) and not self._pending[self._next]:
            self._free_but(max(0, self.in_flight - 2))
            self._reduced.append(self._next)
            self._next += 1
            if self.in_flight == 1:
                self._free_but(0)

    def _free_but(self, count: int) -> None:
        """Free the buffers of all reductions under way but the newest."""
        gone = self._reduced[: max(0, len(self._reduced) - count)]
        self._reduced = self._reduced[len(gone) :]
        for at in gone:
            self._buffers.pop(at, None)
