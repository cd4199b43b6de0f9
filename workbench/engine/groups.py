"""What one kernel of the optimizer steps: tensors side by side, in pieces whose widened copies stay small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

CAST_BYTES = 64 * 2**20
"""What has another dtype than a step is made in is cast in pieces of this size, which bounds the temporary."""


@dataclass(frozen=True, eq=False)
class Group:
    """Tensors that are stepped together, in the same order in every list."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    targets: list[Tensor]
    """What the update is applied to: the masters where there are any, otherwise the parameters themselves."""
    moments: list[list[Tensor]]
    """By moment."""
    counts: list[Tensor]
    """Of the steps taken, 0-d."""
    dtypes: list[torch.dtype]
    """What each update is made in."""
    decay: float

    def part(self, start: int, stop: int) -> Group:
        """Some of the tensors."""
        own = slice(start, stop)
        moments = [moment[own] for moment in self.moments]
        return Group(
            self.parameters[own], self.gradients[own], self.targets[own], moments, self.counts[own], self.dtypes[own],
            self.decay,
        )  # fmt: skip

    def cast_bytes(self, index: int) -> int:
        """Bytes of the copies that one tensor's update needs."""
        used = (self.gradients[index], self.targets[index], *(moment[index] for moment in self.moments))
        dtype = self.dtypes[index]
        return sum(x.numel() * dtype.itemsize for x in used if x.dtype != dtype)

    def pieces(self) -> Iterator[Group]:
        """The group in runs that need at most `CAST_BYTES` of cast tensors (a larger one stands alone)."""
        start, cast = 0, 0
        for index in range(len(self.targets)):
            need = self.cast_bytes(index)
            if index > start and cast + need > CAST_BYTES:
                yield self.part(start, index)
                start, cast = index, 0
            cast += need
        if self.targets:
            yield self.part(start, len(self.targets))

    def widened(self) -> Group:
        """The group in the dtypes that the update is made in; what has them already is itself, not a copy."""
        gradients, targets, *moments = (
            self._cast(of_kind) for of_kind in (self.gradients, self.targets, *self.moments)
        )
        return replace(self, gradients=gradients, targets=targets, moments=moments)

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
