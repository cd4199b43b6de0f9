"""What one kernel of the optimizer steps: tensors side by side, in pieces whose widened copies stay
small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.runtime_facts.cast_sizes import CPU_FUSED_CAST_BYTES, OPTIMIZER_CAST_BYTES


@dataclass(frozen=True, eq=False)
class Group:
    """Tensors that are stepped together, in the same order in every list."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    targets: list[Tensor]
    """What the update is applied to: the masters where there are any, otherwise the parameters
    themselves.
    """
    moments: list[list[Tensor]]
    """By moment."""
    counts: list[Tensor]
    """Of the steps taken, 0-d."""
    counted: list[bool]
    """Whether the step of a tensor is counted by this part of it: the last, where it was cut."""
    dtypes: list[torch.dtype]
    """What each update is made in."""
    decay: float

    def part(self, start: int, stop: int) -> Group:
        """Some of the tensors."""
        own = slice(start, stop)
        moments = [moment[own] for moment in self.moments]
        return Group(
            self.parameters[own],
            self.gradients[own],
            self.targets[own],
            moments,
            self.counts[own],
            self.counted[own],
            self.dtypes[own],
            self.decay,
        )

    def cut(self) -> Group:
        """The group with contiguous tensors in parts that need at most `CPU_FUSED_CAST_BYTES` of
        copies each.
        """
        rows, counts, counted, dtypes = [], [], [], []
        for index, row in enumerate(
            zip(self.parameters, self.gradients, self.targets, *self.moments)
        ):
            parts = _cut(row, self.cast_bytes(index))
            rows += parts
            counts += [self.counts[index]] * len(parts)
            counted += [False] * (len(parts) - 1) + [True]
            dtypes += [self.dtypes[index]] * len(parts)
        parameters, gradients, targets, *moments = map(list, zip(*rows)) if rows else ([], [], [])
        return Group(parameters, gradients, targets, moments, counts, counted, dtypes, self.decay)

    def cast_bytes(self, index: int) -> int:
        """Bytes of the copies that one tensor's update needs."""
        used = (
            self.gradients[index],
            self.targets[index],
            *(moment[index] for moment in self.moments),
        )
        dtype = self.dtypes[index]
        return sum(x.numel() * dtype.itemsize for x in used if x.dtype != dtype)

    def pieces(self, cut: bool = False) -> Iterator[Group]:
        """The group in runs that need at most `OPTIMIZER_CAST_BYTES` of cast tensors (a larger one
        stands alone); where large tensors are `cut`, `CPU_FUSED_CAST_BYTES`.
        """
        own, limit = (self.cut(), CPU_FUSED_CAST_BYTES) if cut else (self, OPTIMIZER_CAST_BYTES)
        start, cast = 0, 0
        for index in range(len(own.targets)):
            need = own.cast_bytes(index)
            if index > start and cast + need > limit:
                yield own.part(start, index)
                start, cast = index, 0
            cast += need
        if own.targets:
            yield own.part(start, len(own.targets))

    def widened(self) -> Group:
        """The group in the dtypes that the update is made in; what has them already is itself, not
        a copy.
        """
        gradients, targets, *moments = (
            self._cast(of_kind) for of_kind in (self.gradients, self.targets, *self.moments)
        )
        counts = [count if own else count.clone() for count, own in zip(self.counts, self.counted)]
        return replace(self, gradients=gradients, targets=targets, moments=moments, counts=counts)

    def _cast(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [x.to(dtype) for x, dtype in zip(tensors, self.dtypes)]

    def take(self, stepped: Group) -> None:
        """Keep what `stepped`, the group widened, holds now."""
        for mine, theirs in zip((self.targets, *self.moments), (stepped.targets, *stepped.moments)):
            for narrow, wide in zip(mine, theirs):
                if narrow is not wide:
                    narrow.copy_(wide)
        for parameter, target, wide in zip(self.parameters, self.targets, stepped.targets):
            if parameter is not target:
                parameter.copy_(wide)


def _cut(row: Sequence[Tensor], cast: int) -> list[tuple[Tensor, ...]]:
    """Parts of tensors of one shape; what is there twice, a parameter that is its own target, stays
    one tensor.
    """
    if cast <= CPU_FUSED_CAST_BYTES or not all(x.is_contiguous() for x in row):
        return [tuple(row)]
    size = max(64, row[0].numel() * CPU_FUSED_CAST_BYTES // cast // 64 * 64)
    parts = {id(x): x.view(-1).split(size) for x in row}
    return list(zip(*(parts[id(x)] for x in row)))
