"""Seconds of redistribution along one edge, for each pair of strategies of its ends.

The sequence of collectives of least time is itself searched, which takes a millisecond a pair. A
table therefore begins with lower bounds, and prices pairs as they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from workbench.plan.operators.operator_graph import TensorEdge
from workbench.plan.operators.tensor_layout import TensorLayout
from workbench.planner.autoshard.device_mesh import LogicalMesh
from workbench.planner.autoshard.operator_splits import ShardingStrategy
from workbench.planner.autoshard.redistribution_bounds import RedistributionBounds
from workbench.planner.autoshard.strategy_search.shared_arrays import Array

Layouts = tuple[TensorLayout, TensorLayout]
"""Of the tensor of an edge: as it is held; and of its gradient as its reader leaves it, which once
it is summed is how the reader wants the tensor.
"""


@dataclass
class EdgeTable:
    """One layer's seconds of an edge, in both passes, [strategies of source, of target]."""

    edge: TensorEdge
    sources: Sequence[ShardingStrategy]
    targets: Sequence[ShardingStrategy]
    mesh: LogicalMesh
    size: float
    """Bytes of the unsharded tensor."""
    price: Callable[[Layouts], float]
    seconds: Array = field(init=False)
    """Prices where they are known, else bounds; inf: illegal together."""
    number: NDArray[np.int64] = field(init=False)
    """Of the layouts of each pair whose price is not known, else -1."""
    layouts: list[Layouts] = field(init=False, default_factory=list)
    aligned: NDArray[np.bool_] = field(init=False)
    """Whether the tensor already has the layout that its reader wants."""

    def __post_init__(self) -> None:
        held, of_source = _distinct(map(self._held, self.sources))
        wanted, of_target = _distinct(map(self._gradient, self.targets))
        seconds, number = self._bounds(held, wanted), np.full((len(held), len(wanted)), -1)
        num_dims = max(len(layout.dims) for layout in (*held, *wanted))
        has, wants = ([x.of_dims(num_dims) for x in layouts] for layouts in (held, wanted))
        for i, one in enumerate(held):
            for j, other in enumerate(wanted):
                if not _legal(self.edge, one, other, self.mesh):
                    seconds[i, j] = math.inf
                elif self.edge.source_tensor.kind != "parameter":
                    number[i, j] = len(self.layouts)
                    self.layouts.append((has[i], wants[j]))
        pairs = np.ix_(of_source, of_target)
        self.seconds, self.number = seconds[pairs], number[pairs]
        self.aligned = np.array([[a.dims == b.dims for b in wants] for a in has])[pairs]

    def _held(self, source: ShardingStrategy) -> TensorLayout:
        return held_layout(self.edge, source)

    def _gradient(self, target: ShardingStrategy) -> TensorLayout:
        return target.partial_layout(self.edge.target_tensor)

    def _bounds(self, held: Sequence[TensorLayout], wanted: Sequence[TensorLayout]) -> Array:
        if self.edge.source_tensor.kind == "parameter" or not self.mesh.axes:
            return np.zeros((len(held), len(wanted)))
        return RedistributionBounds(self.mesh, self.size).seconds(held, wanted)

    def refine(self, pair: tuple[int, int]) -> bool:
        """Price a pair and those of equal layouts; whether its price was not known."""
        number = int(self.number[pair])
        if number < 0:
            return False
        alike = self.number == number
        self.seconds[alike], self.number[alike] = self.price(self.layouts[number]), -1
        return True

    def exact(self) -> EdgeTable:
        """This table with every pair priced."""
        for number in np.unique(self.number[self.number >= 0]):
            self.refine(tuple(np.argwhere(self.number == number)[0]))
        return self

    def redistribution(self) -> Array:
        """Seconds beyond what the sum of the gradient takes in any case."""
        beyond = np.maximum(self.seconds - self._sums, 0.0)
        return np.where(self.aligned & np.isfinite(self.seconds), 0.0, beyond)

    @cached_property
    def _sums(self) -> Array:
        """Seconds of the sum of the gradient alone, by how each target leaves it."""
        if self.edge.source_tensor.kind == "parameter":
            return np.zeros(len(self.targets))
        left, of_target = _distinct(map(self._gradient, self.targets))
        return np.array([self.price((one.summed, one)) for one in left])[of_target]


def edge_layouts(edge: TensorEdge, source: ShardingStrategy, target: ShardingStrategy) -> Layouts:
    """Layouts of the tensor of `edge` and of its gradient under these strategies."""
    return padded(held_layout(edge, source), target.partial_layout(edge.target_tensor))


def held_layout(edge: TensorEdge, source: ShardingStrategy) -> TensorLayout:
    """The layout that an output has; of a parameter the one that its gradient has."""
    if edge.source_tensor.kind == "parameter":
        return source.partial_layout(edge.source_tensor)
    return source.output_layout(edge.source_tensor)


def padded(held: TensorLayout, gradient: TensorLayout) -> Layouts:
    """Two layouts of as many dims."""
    num_dims = max(len(held.dims), len(gradient.dims))
    return held.of_dims(num_dims), gradient.of_dims(num_dims)


def _distinct(layouts: Iterable[TensorLayout]) -> tuple[list[TensorLayout], NDArray[np.int64]]:
    """Layouts, each once, and which of them each of `layouts` is."""
    found: dict[TensorLayout, int] = {}
    numbers = [found.setdefault(layout, len(found)) for layout in layouts]
    return [*found], np.array(numbers, dtype=np.int64)


def is_aligned(edge: TensorEdge, source: ShardingStrategy, target: ShardingStrategy) -> bool:
    """Whether the tensor of `edge` already has the layout that its reader wants."""
    held, gradient = edge_layouts(edge, source, target)
    return held.summed == gradient.summed


def legal_together(
    edge: TensorEdge, source: ShardingStrategy, target: ShardingStrategy, mesh: LogicalMesh
) -> bool:
    """Whether a shared parameter lies and is reduced alike, and unpadded pieces are even."""
    return _legal(edge, *edge_layouts(edge, source, target), mesh)


def _legal(edge: TensorEdge, held: TensorLayout, gradient: TensorLayout, mesh: LogicalMesh) -> bool:
    if edge.source_tensor.kind == "parameter":
        return held == gradient
    if edge.unpadded is None or held == gradient.summed:
        return True
    pieces = (mesh.ranks_over(layout.dims[-1]) for layout in (held, gradient))
    return all(edge.unpadded % count == 0 for count in pieces)
