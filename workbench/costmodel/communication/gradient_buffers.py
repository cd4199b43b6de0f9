"""Unsharded gradients of ZeRO-2 and 3 that are reduced after every microbatch: each bucket has a
buffer from its first gradient until it is reduced (`parallel/data/zero_shards.py`), and under
offload its shard another, until it is on the host (`parallel/data/offload/offloaded_grads.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from workbench.costmodel.communication.packed_buckets import PackedBucket, rank_buckets
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.operators.allocation_tape import AllocationTape, Storage


class GradientBuffers:
    """Buffers of one stage in a backward.

    Args:
        tape: Where they are allocated.
        buckets: In the order in which they are reduced.
        names: Parameters that run: of several layers alike one may stand for many.
        element_bytes: Of a gradient.
        in_flight: Buffers that are alive at once; 0: all, until backward is over.
        leaving: Share of the shards that are copied to the host.
        adds: Whether they are brought back from there, to be added to.
    """

    def __init__(
        self,
        tape: AllocationTape,
        buckets: Sequence[PackedBucket],
        names: Collection[str],
        element_bytes: float,
        in_flight: int,
        leaving: float = 0.0,
        adds: bool = False,
    ) -> None:
        self.tape, self.in_flight, self.leaving, self.adds = tape, in_flight, leaving, adds
        self.element_bytes = element_bytes
        run = [([p.name for p in bucket.members if p.name in names], bucket) for bucket in buckets]
        self.buckets = [bucket for own, bucket in run if own]
        members = [own for own, _ in run if own]
        self._of = {name: at for at, own in enumerate(members) for name in own}
        self._pending = [len(own) for own in members]
        self._buffers: dict[int, Storage] = {}
        self._reduced: list[tuple[list[Storage], float]] = []
        """(buffers, bytes of the shard that is still to leave) of each reduction under way."""
        self._next = 0

    def accumulate(self, name: str) -> None:
        """Take a parameter's gradient."""
        at = self._of[name]
        if at not in self._buffers:
            with self.tape.category("communication"):
                size = self.buckets[at].elements * self.element_bytes
                self._buffers[at] = self.tape.allocate(size)
        self._pending[at] -= 1

    def reduce_complete(self) -> None:
        """Reduce the buckets that are complete, in their order."""
        if not self.in_flight:
            return
        while self._next < len(self.buckets) and not self._pending[self._next]:
            self._advance_but(max(0, self.in_flight - 2))
            self._reduced.append(self._reduction(self._next))
            self._next += 1
            if self.in_flight == 1:
                self._advance_but(0)

    def _reduction(self, at: int) -> tuple[list[Storage], float]:
        bucket, held = self.buckets[at], [self._buffers.pop(at)]
        shard = 0.0 if bucket.partial_over else self.leaving * bucket.elements / bucket.shards
        if shard and self.adds:
            held.append(self._shard(shard * self.element_bytes))
        return held, shard * self.element_bytes

    def _shard(self, num_bytes: float) -> Storage:
        with self.tape.category("communication"):
            return self.tape.allocate(num_bytes)

    def _advance_but(self, count: int) -> None:
        """Free the buffers of all reductions under way but the newest, and those of shards that
        have left.
        """
        split = max(0, len(self._reduced) - count)
        old, self._reduced = self._reduced[:split], self._reduced[split:]
        left: list[tuple[list[Storage], float]] = []
        while old:
            held, shard = old.pop(0)
            if shard:  # the sum is in what came from the host, else in a copy
                left.append(([held[1] if self.adds else self._shard(shard)], 0.0))
            del held
        self._reduced = left + self._reduced


def buffers_on_tape(w: Workload) -> bool:
    """True where a microbatch on a rank of operator strategies allocates these buffers as it runs;
    under a pipeline, whose stages are reduced whole, they are counted phase by phase.
    """
    each = w.zero >= 2 and w.fixed.operators is not None and w.fixed.pipeline == 1
    return each and bool(np.all(w.reduce_microbatch))


def operator_buffers(
    tape: AllocationTape, w: Workload, names: Collection[str]
) -> GradientBuffers | None:
    """Buffers of a rank's only stage, whose parameters `names` run; None where it has none."""
    if not buffers_on_tape(w):
        return None
    alone, offloads = float(w.searched.shard) == 1, w.fixed.framework.data_parallel.stages_offload
    return GradientBuffers(
        tape,
        rank_buckets(w, 0)[0],
        names,
        float(w.gradient_element_bytes),
        1 if alone else w.fixed.num_zero_in_flight,
        float(np.max(w.searched.offload_optimizer)) * offloads * (not alone),
        float(np.max(w.microbatches)) > 1,
    )
