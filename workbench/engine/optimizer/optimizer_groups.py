"""Groups of tensors that one optimizer kernel updates, split so that upcast copies stay small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.parallel.data.offload.host_arena import host_zeros
from workbench.planned_device import HOST
from workbench.runtime_facts.cast_sizes import OPTIMIZER_CAST_BYTES


@dataclass(frozen=True, eq=False)
class OptimizerGroup:
    """Tensors updated by one kernel, in the same order in every list."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    targets: list[Tensor]
    """Updated tensors: master weights where there are any, else the parameters themselves."""
    moments: list[list[Tensor]]
    """One list per moment."""
    step_counts: list[Tensor]
    """Steps taken, 0-d."""
    counts_step: list[bool]
    """Whether this part of a tensor increments its step count: of a tensor in parts, the last."""
    dtypes: list[torch.dtype]
    """Dtype of each update."""
    decay: float
    scratch: CastScratch | None = None
    """Where upcast copies go, of tensors in host memory."""

    def select(self, start: int, stop: int) -> OptimizerGroup:
        """The tensors from `start` to `stop`."""
        own = slice(start, stop)
        moments = [moment[own] for moment in self.moments]
        return OptimizerGroup(
            self.parameters[own],
            self.gradients[own],
            self.targets[own],
            moments,
            self.step_counts[own],
            self.counts_step[own],
            self.dtypes[own],
            self.decay,
        )

    def cut(self, limit: int) -> OptimizerGroup:
        """The group with contiguous tensors cut into parts of `limit` bytes of copies."""
        rows, counts, counts_step, dtypes = [], [], [], []
        for index, row in enumerate(
            zip(self.parameters, self.gradients, self.targets, *self.moments)
        ):
            parts = _cut(row, self.cast_bytes(index), limit)
            rows += parts
            counts += [self.step_counts[index]] * len(parts)
            counts_step += [False] * (len(parts) - 1) + [True]
            dtypes += [self.dtypes[index]] * len(parts)
        parameters, gradients, targets, *moments = map(list, zip(*rows)) if rows else ([], [], [])
        return OptimizerGroup(
            parameters, gradients, targets, moments, counts, counts_step, dtypes, self.decay
        )

    def cast_bytes(self, index: int) -> int:
        """Bytes of the upcast copies that one tensor's update needs."""
        used = (
            self.gradients[index],
            self.targets[index],
            *(moment[index] for moment in self.moments),
        )
        dtype = self.dtypes[index]
        return sum(x.numel() * dtype.itemsize for x in used if x.dtype != dtype)

    def split(self, cut: int | None = None) -> Iterator[OptimizerGroup]:
        """Split into groups that need at most `OPTIMIZER_CAST_BYTES` of upcast copies each, a
        larger tensor alone; with `cut` into groups of at most so many bytes, larger tensors cut.
        """
        own, limit = (self, OPTIMIZER_CAST_BYTES) if cut is None else (self.cut(cut), cut)
        start, cast = 0, 0
        for index in range(len(own.targets)):
            need = own.cast_bytes(index)
            if index > start and cast + need > limit:
                yield own.select(start, index)
                start, cast = index, 0
            cast += need
        if own.targets:
            yield own.select(start, len(own.targets))

    def total_cast_bytes(self) -> int:
        """Bytes of the upcast copies that the update of all tensors needs."""
        return sum(map(self.cast_bytes, range(len(self.targets))))

    def upcast(self) -> OptimizerGroup:
        """The group in the dtypes of the updates; tensors that have them already are not copied."""
        if self.scratch is not None:
            self.scratch.restart()
        gradients, targets, *moments = (
            self._cast(of_kind) for of_kind in (self.gradients, self.targets, *self.moments)
        )
        counts = [
            count if own else count.clone()
            for count, own in zip(self.step_counts, self.counts_step)
        ]
        return replace(
            self, gradients=gradients, targets=targets, moments=moments, step_counts=counts
        )

    def _cast(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if (scratch := self.scratch) is None:
            return [x.to(dtype) for x, dtype in zip(tensors, self.dtypes)]
        return [
            x if x.dtype == dtype else scratch.copy(x, dtype)
            for x, dtype in zip(tensors, self.dtypes)
        ]

    def store(self, stepped: OptimizerGroup) -> None:
        """Round the updated upcast copies into the group's own tensors."""
        for mine, theirs in zip((self.targets, *self.moments), (stepped.targets, *stepped.moments)):
            for narrow, wide in zip(mine, theirs):
                if narrow is not wide:
                    narrow.copy_(wide)
        for parameter, target, wide in zip(self.parameters, self.targets, stepped.targets):
            if parameter is not target:
                parameter.copy_(wide)


class CastScratch:
    """Host memory for upcast copies of one group after another."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = host_zeros(nbytes, torch.uint8, HOST)
        self._used = 0

    def restart(self) -> None:
        """Begin with another group: former copies are overwritten."""
        self._used = 0

    def copy(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of `x` in `dtype`."""
        start, self._used = self._used, self._used + x.numel() * dtype.itemsize
        return self.buffer[start : self._used].view(dtype).view(x.shape).copy_(x)


def _cut(row: Sequence[Tensor], cast: int, limit: int) -> list[tuple[Tensor, ...]]:
    """Cut tensors of one shape alike; a parameter that is its own target stays one tensor."""
    if cast <= limit or not all(x.is_contiguous() for x in row):
        return [tuple(row)]
    size = max(64, row[0].numel() * limit // cast // 64 * 64)
    parts = {id(x): x.view(-1).split(size) for x in row}
    return list(zip(*(parts[id(x)] for x in row)))
