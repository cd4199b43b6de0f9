"""Redistribution at the borders of an operator on shapes, as `parallel/operators/redistribution.py`
does it: by the steps that `LeastRedistribution` chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial

from workbench.costmodel.operators.redistribution_shapes import redistributed
from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_functions import GatheredAgain, add
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.plan.operators.operator_layouts import OperatorLayouts, gathers_tokens
from workbench.plan.operators.strategy_form import Placement
from workbench.plan.operators.tensor_layout import TensorLayout


@dataclass(eq=False)
class SharedShapes:
    """Inputs that several modules of one parent read, redistributed once; they stay referenced
    until the parent's forward is over.
    """

    redistributed: dict[tuple[int, TensorLayout], tuple[SymbolicTensor, SymbolicTensor]] = field(
        default_factory=dict
    )
    gathered: dict[int, GatheredAgain] = field(default_factory=dict)
    """How inputs whose tokens other ranks hold are gathered again, by the result's id."""

    def clear(self) -> None:
        """The parent's forward is over."""
        self.redistributed.clear()
        self.gathered.clear()

    def redistribute(
        self, r: SymbolicRank, x: SymbolicTensor, gradient: TensorLayout
    ) -> SymbolicTensor:
        """This rank's part of `x` in the layout of its `gradient`, once that is summed."""
        key = id(x), gradient
        if key not in self.redistributed:
            local, held = local_part(r, x)
            result = redistribute(r, local, held, gradient.summed, gradient)
            self.redistributed[key] = x, result
            if not r.recomputes and gathers_tokens(held, gradient):
                own = local.detached()
                again = partial(redistributed, r, own, held, gradient.summed)
                self.gathered[id(result)] = GatheredAgain(again)
        return self.redistributed[key][1]


@dataclass(frozen=True)
class ShapeSharding(OperatorLayouts):
    """One operator's strategy on the grid: the dimension that each axis shards."""

    r: SymbolicRank
    placement: Placement
    shared: SharedShapes
    output: Placement | None = None
    """The dimension of the output that each axis shards, where that is not the placement's."""

    def to_local(self, x: SymbolicTensor, **dims: int) -> SymbolicTensor:
        """This rank's shard of an input, plain."""
        return self.shared.redistribute(self.r, x, self.partial_layout(len(x.shape), dims))

    def gathered(self, local: SymbolicTensor) -> GatheredAgain | None:
        """How an input that `to_local` has returned is gathered again in backward, if it is."""
        return self.shared.gathered.get(id(local))

    def reduce_partial(self, y: SymbolicTensor, **dims: int) -> SymbolicTensor:
        """Reduce a local result over the ranks that shard a dimension which it lacks, to the layout
        of the output.
        """
        held = self.partial_layout(len(y.shape), dims)
        return redistribute(self.r, y, held, self.output_layout(len(y.shape), dims))

    def to_global(self, y: SymbolicTensor, **dims: int) -> SymbolicTensor:
        """A local result as a shard, or as it is if every rank holds all of it."""
        layout = self.output_layout(len(y.shape), dims)
        return as_shard(self.r, y, layout) if layout.sharding else y

    def only(self, *names: str) -> ShapeSharding:
        """The same with the axes alone that shard these dimensions."""
        own = tuple(each if each in names else None for each in self.placement)
        return replace(self, placement=own, output=None)


def unsharded(num_dims: int) -> TensorLayout:
    """The layout of a tensor that every rank holds."""
    return TensorLayout(((),) * num_dims)


def replicated(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    """A shard as the plain tensor that every rank holds."""
    if x.layout is None:
        return x
    local, held = local_part(r, x)
    return redistribute(r, local, held, unsharded(len(x.shape)))


def local_part(r: SymbolicRank, x: SymbolicTensor) -> tuple[SymbolicTensor, TensorLayout]:
    """A rank's part, plain, and how it lies."""
    layout = x.layout
    if layout is None:
        return x, unsharded(len(x.shape))

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (replace(gradient, layout=layout),)

    return r.made(replace(x, layout=None), backward, x), layout


def as_shard(
    r: SymbolicRank,
    x: SymbolicTensor,
    layout: TensorLayout,
    gradient_layout: TensorLayout | None = None,
) -> SymbolicTensor:
    """A local part as a shard; backward brings the gradient to its layout, or to that of its
    gradient.
    """

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert gradient.layout is not None
        local = replace(gradient, layout=None)
        return (redistributed(r, local, gradient.layout, gradient_layout or layout),)

    return r.made(replace(x, layout=layout), backward, x)


def redistribute(
    r: SymbolicRank,
    x: SymbolicTensor,
    held: TensorLayout,
    wanted: TensorLayout,
    gradient: TensorLayout | None = None,
) -> SymbolicTensor:
    """A rank's part of a tensor, plain, in another layout; `gradient` is that of the result's
    gradient, `wanted` by default.
    """
    back = gradient or wanted
    if held == wanted and back == held:
        return x

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (redistributed(r, gradient, back, held.summed),)

    return r.made(redistributed(r, x, held, wanted), backward, x)


def sharded_sum(r: SymbolicRank, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
    """x + y, where either may be a shard: in the layout of one of them that is reached in least
    time.
    """
    if x.layout is None and y.layout is None:
        return add(r, x, y)
    every = unsharded(len(x.shape))
    both = [z if z.layout is not None else as_shard(r, z, every) for z in (x, y)]
    layouts = [z.layout or every for z in both]
    size = x.bytes * math.prod(layouts[0].num_parts(r.sides))

    def cost(to: TensorLayout) -> int:
        return sum(
            r.least.femtoseconds(at, to, size) + r.least.femtoseconds(to, at.summed, size)
            for at in layouts
        )

    chosen = min((layout.summed for layout in layouts), key=cost)
    x, y = (_laid_out(r, z, chosen) for z in both)
    return add(r, x, y)


def _laid_out(r: SymbolicRank, x: SymbolicTensor, layout: TensorLayout) -> SymbolicTensor:
    if x.layout == layout:
        return x
    local, held = local_part(r, x)
    return as_shard(r, redistribute(r, local, held, layout), layout)
