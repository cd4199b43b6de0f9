"""Redistribution at the borders of an operator, to the sharding of its strategy.

Within an operator tensors are local and plain. Between operators a tensor that every rank holds
unsharded is plain, and a sharded one is a DTensor; code that cannot handle a DTensor gets the
replicated tensor. Partial results are reduced where they arise. DTensor carries the layout only:
what is communicated are the steps that `LeastRedistribution` chooses, as the planner prices them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as DTensorPlacement

from workbench.parallel.mesh import MeshAxis
from workbench.parallel.operators.gathered_again import (
    GatheredAgain,
    keeps_gathered,
    reading,
    storage_of,
)
from workbench.parallel.operators.redistribution_collectives import GridGroups
from workbench.plan.operators.least_redistribution import LeastRedistribution
from workbench.plan.operators.operator_layouts import OperatorLayouts
from workbench.plan.operators.strategy_form import Placement
from workbench.plan.operators.tensor_layout import TensorLayout


class RedistributionGrid:
    """The grid that tensor ranks are to operator strategies, with its redistributions.

    Args:
        device: The grid as a DeviceMesh.
        axes: Each run of neighboring axes of the grid as this rank sees it.
        least: Chooses the steps.
    """

    def __init__(
        self,
        device: DeviceMesh,
        axes: Mapping[tuple[int, ...], MeshAxis],
        least: LeastRedistribution,
    ) -> None:
        self.device, self.axes, self.least = device, axes, least
        self.groups = GridGroups(axes, least.sizes)

    def run(self, x: Tensor, held: TensorLayout, wanted: TensorLayout) -> Tensor:
        """A rank's part of a tensor, redistributed; `x` itself where nothing is to do.

        Raises:
            ValueError: A dim does not divide.
        """
        size = x.numel() * x.element_size() * math.prod(held.num_parts(self.least.sizes))
        result = x
        steps = self.least.steps(held, wanted, size)
        if steps:
            _refuse_uneven(x, held, wanted, self.least.sizes)
        for step in steps:
            result = self.groups.take(result, step)
        if steps and steps[-1].kind == "slice":  # lest it keep the memory that it is a view of
            result = result.clone(memory_format=torch.contiguous_format)
        return result

    def redistribute(
        self,
        x: Tensor,
        held: TensorLayout,
        wanted: TensorLayout,
        gradient: TensorLayout | None = None,
    ) -> Tensor:
        """A rank's part of a tensor, redistributed, and its gradient back in backward.

        Args:
            x: The local part, plain.
            held: Its layout.
            wanted: The layout of the result.
            gradient: The layout of the result's gradient; default: `wanted`.
        """
        back = gradient or wanted
        if held == wanted and back == held:
            return x
        result: Tensor = _Redistribute.apply(x, self, held, wanted, back)
        return result

    def local(self, x: Tensor) -> tuple[Tensor, TensorLayout]:
        """A rank's part of a DTensor, or a plain tensor that every rank holds; its layout."""
        if not isinstance(x, DTensor):
            return x, TensorLayout(((),) * x.ndim)
        return x.to_local(grad_placements=x.placements), layout_of(x)

    def dtensor(
        self, x: Tensor, layout: TensorLayout, gradient: TensorLayout | None = None
    ) -> DTensor:
        """A local part as a DTensor; backward redistributes the gradient to its layout, or to that
        of its `gradient`.
        """
        result: DTensor = _ToDTensor.apply(x, self, layout, gradient or layout)
        return result

    def laid_out(self, x: DTensor, layout: TensorLayout) -> DTensor:
        """A DTensor in this layout."""
        local, held = self.local(x)
        return x if held == layout else self.dtensor(self.redistribute(local, held, layout), layout)

    def common_layout(self, tensors: Sequence[DTensor]) -> TensorLayout:
        """The layout of one of them that the others, of the same shape, get to in least time,
        there and back.
        """

        def cost(to: TensorLayout) -> int:
            pairs = [(layout_of(x), x.numel() * x.element_size()) for x in tensors]
            return sum(
                self.least.femtoseconds(at, to, size) + self.least.femtoseconds(to, at.summed, size)
                for at, size in pairs
            )

        return min((layout_of(x).summed for x in tensors), key=cost)

    def replicated(self, x: Any) -> Any:
        """A DTensor as a plain tensor that every rank holds; anything else as it is."""
        if not isinstance(x, DTensor):
            return x
        local, held = self.local(x)
        return self.redistribute(local, held, TensorLayout(((),) * x.ndim))


class _Redistribute(torch.autograd.Function):
    """Forward and backward each run their own steps of least time."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        grid: RedistributionGrid,
        held: TensorLayout,
        wanted: TensorLayout,
        back: TensorLayout,
    ) -> Tensor:
        ctx.grid, ctx.back, ctx.held = grid, back, held.summed
        result = grid.run(x, held, wanted)
        return x.view_as(x) if result is x else result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.grid.run(gradient, ctx.back, ctx.held), None, None, None, None


class _ToDTensor(torch.autograd.Function):
    """`DTensor.from_local`, whose gradient, if operations between have left it in another layout,
    takes the steps of least time.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, grid: RedistributionGrid, layout: TensorLayout, gradient: TensorLayout
    ) -> DTensor:
        ctx.grid, ctx.layout = grid, gradient
        placements = dtensor_placements(layout, grid.device.ndim)
        return DTensor.from_local(x.view_as(x), grid.device, placements, run_check=False)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Tensor, None, None, None]:
        local = ctx.grid.run(gradient.to_local(), layout_of(gradient), ctx.layout)
        return local, None, None, None


def layout_of(x: DTensor) -> TensorLayout:
    """The layout that a DTensor's placements are.

    Raises:
        ValueError: It is neither sharded in even parts, replicated nor a sum.
    """
    at: list[int | None] = []
    partial: list[int] = []
    for axis, placement in enumerate(x.placements):
        at.append(placement.dim if type(placement) is Shard else None)
        if isinstance(placement, Partial) and placement.reduce_op == "sum":
            partial.append(axis)
        elif type(placement) not in (Shard, Replicate):
            raise ValueError(f"a tensor is {placement}; legal: sharded, replicated or a sum")
    return TensorLayout.placed(at, x.ndim, partial)


def dtensor_placements(layout: TensorLayout, num_axes: int) -> tuple[DTensorPlacement, ...]:
    """The layout as one placement for each axis of the grid."""
    return tuple(
        Partial() if axis in layout.partial else Replicate() if dim is None else Shard(dim)
        for axis, dim in enumerate(layout.at(num_axes))
    )


def _refuse_uneven(
    x: Tensor, held: TensorLayout, wanted: TensorLayout, sizes: tuple[int, ...]
) -> None:
    parts = zip(x.shape, held.num_parts(sizes), wanted.num_parts(sizes))
    for dim, (length, has, wants) in enumerate(parts):
        if length * has % wants:
            raise ValueError(
                f"dim {dim} of a tensor to be redistributed has {length * has} entries, which "
                f"{wants} ranks do not divide; legal: a multiple of {wants}"
            )


@dataclass(eq=False)
class SharedInputs:
    """Inputs that several modules of one parent read, redistributed once.

    Their gradients are then added before the one redistribution of backward. Inputs stay
    referenced until the parent's forward is over, which also keeps their ids valid as keys.
    """

    redistributed: dict[tuple[int, TensorLayout], tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )
    gathered: dict[int, GatheredAgain] = field(default_factory=dict)
    """Of those whose tokens other ranks hold: how they are gathered again, by the result's id."""

    def redistribute(self, x: Tensor, grid: RedistributionGrid, gradient: TensorLayout) -> Tensor:
        """A rank's part of `x` in the layout of its `gradient`, once that is summed."""
        key = id(x), gradient
        if key not in self.redistributed:
            local, held = grid.local(x)
            result = grid.redistribute(local, held, gradient.summed, gradient)
            self.redistributed[key] = x, result
            if keeps_gathered(held, gradient):
                own = local.detach()
                again = partial(grid.run, own, held, gradient.summed)
                self.gathered[id(result)] = GatheredAgain(again, storage_of(result))
        return self.redistributed[key][1]

    def during(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The parent's forward, which releases the inputs when it is over.

        Not a hook: activation checkpointing recomputes by calling `forward`, without hooks.
        """

        @wraps(forward)
        def releasing(*inputs: Any, **named: Any) -> Any:
            try:
                return forward(*inputs, **named)
            finally:
                self.redistributed.clear()
                self.gathered.clear()

        return releasing


@dataclass(frozen=True)
class OperatorSharding(OperatorLayouts):
    """One operator's strategy on the grid: the dimension that each axis shards, None to replicate.

    Methods take the dim of each named dimension in the tensor at hand, e.g. `rows=0, tokens=1,
    inner=-1`.
    """

    grid: RedistributionGrid
    placement: Placement
    shared: SharedInputs
    output: Placement | None = None
    """The dimension of the output that each axis shards, where that is not the placement's."""

    def to_local(self, x: Tensor, **dims: int) -> Tensor:
        """This rank's shard of an input, as a plain tensor.

        Ranks that shard a dimension which the input lacks use the same input, so that its gradient
        is partial on them: backward sums it, on its way to the layout of `x`.
        """
        return self.shared.redistribute(x, self.grid, self.partial_layout(x.ndim, dims))

    def reading(self, local: Tensor) -> AbstractContextManager[Any]:
        """What a GEMM runs in that reads an input which `to_local` has returned."""
        return reading(self.shared.gathered.get(id(local)))

    def reduce_partial(self, y: Tensor, **dims: int) -> Tensor:
        """Reduce a local result over the ranks that shard a dimension which it lacks, to the layout
        of the output.
        """
        held = self.partial_layout(y.ndim, dims)
        return self.grid.redistribute(y, held, self.output_layout(y.ndim, dims))

    def to_global(self, y: Tensor, **dims: int) -> Tensor:
        """A local result as a DTensor, or as it is if every rank holds all of it."""
        layout = self.output_layout(y.ndim, dims)
        return self.grid.dtensor(y, layout) if layout.sharding else y

    def restricted_to(self, *names: str) -> OperatorSharding:
        """The same with only the axes that shard these dimensions."""
        own = tuple(each if each in names else None for each in self.placement)
        return replace(self, placement=own, output=None)
