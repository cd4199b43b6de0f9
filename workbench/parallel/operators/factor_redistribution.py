"""Redistribution of local tensors between layouts by factors, forward and backward.

A tensor is viewed by its factors, of which each axis of the grid shards one evenly, also where a
dim of the tensor is a product of several. What is communicated are the steps of least time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.parallel.mesh import MeshAxis
from workbench.parallel.operators.redistribution import RedistributionGrid
from workbench.plan.operators.tensor_layout import TensorLayout
from workbench.plan.operators.traced.graph_placement import FactorLayout
from workbench.plan.operators.traced.node_factors import TensorFactors

NONE: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Spread:
    """How a tensor lies on the grid: its layout, and the axes over which it is a partial sum."""

    layout: FactorLayout
    partial: frozenset[int] = NONE


@dataclass(frozen=True)
class FactorGrid:
    """The grid of tensor ranks as this rank sees it.

    Attributes:
        axes: Outermost first; none on one device.
        between: Redistributes, and has the groups of neighboring axes.
    """

    axes: tuple[MeshAxis, ...] = ()
    between: RedistributionGrid | None = None

    @property
    def sides(self) -> tuple[int, ...]:
        """Ranks along each axis."""
        return tuple(axis.size for axis in self.axes)

    def local_sizes(self, factors: TensorFactors, layout: FactorLayout) -> list[int]:
        """Local size of each factor in a row."""
        return factors.local_sizes(layout, self.sides)

    def local_shape(self, factors: TensorFactors, layout: FactorLayout) -> list[int]:
        """Local shape of a tensor."""
        return factors.local_shape(layout, self.sides)

    def first(self, layout: FactorLayout, factor: int, local: int) -> int:
        """The first index of this rank's shard, `local` long, of a factor."""
        index = 0
        for axis, at in zip(self.axes, layout):
            index = index * axis.size + axis.index if at == factor else index
        return index * local

    def redistribute(
        self, x: Tensor, factors: TensorFactors, source: Spread, target: Spread
    ) -> Tensor:
        """A local tensor in another layout; partial sums are reduced."""
        if source == target or self.between is None:
            return x
        local = x.reshape(self.local_sizes(factors, source.layout))
        if x.is_complex():  # not every collective takes complex numbers
            local = torch.view_as_real(local)
        held, wanted = (_tensor_layout(spread, local.ndim) for spread in (source, target))
        local = self.between.run(local, held, wanted)
        if x.is_complex():
            local = torch.view_as_complex(local)
        return local.reshape(self.local_shape(factors, target.layout))

    def joint(self, axes: Sequence[int]) -> MeshAxis:
        """Neighboring axes as one."""
        assert self.between is not None
        return self.between.axes[tuple(axes)]


def _tensor_layout(spread: Spread, num_factors: int) -> TensorLayout:
    return TensorLayout.placed(spread.layout, num_factors, sorted(spread.partial))


def redistributed(
    x: Tensor,
    known: Tensor | None,
    grid: FactorGrid,
    factors: TensorFactors,
    ways: tuple[Spread, Spread, Spread, Spread],
) -> Tensor:
    """`x` in another layout, differentiably.

    Args:
        x: Local.
        known: The result, where an earlier call has computed it.
        grid: The ranks.
        factors: Of the tensor.
        ways: From and to in forward; from and to of the gradient in backward.
    """
    if ways[0] == ways[1] and ways[2] == ways[3]:
        return x
    result: Tensor = _Redistribute.apply(x, known, grid, factors, ways)
    return result


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        known: Tensor | None,
        grid: FactorGrid,
        factors: TensorFactors,
        ways: tuple[Spread, Spread, Spread, Spread],
    ) -> Tensor:
        ctx.grid, ctx.factors, ctx.ways = grid, factors, ways
        if known is None:
            known = grid.redistribute(x.detach(), factors, ways[0], ways[1])
        return known.view_as(known)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        given = ctx.grid.redistribute(gradient, ctx.factors, *ctx.ways[2:])
        return given, None, None, None, None
