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
from workbench.planner.autoshard.strategy_search.choice_problem import Array

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
        for i, one in enumerate(held):
            for j, other in enumerate(wanted):
                if not _legal(self.edge, one, other, self.mesh):
                    seconds[i, j] = math.inf
                elif self.edge.source_tensor.kind != "parameter":
                    number[i, j] = len(self.layouts)
                    self.layouts.append(padded(one, other))
        pairs = np.ix_(of_source, of_target)
        self.seconds, self.number = seconds[pairs], number[pairs]
        both = [[padded(one, other) for other in wanted] for one in held]
        self.aligned = np.array([[a.summed == b.summed for a, b in row] for row in both])[pairs]

    def _held(self, source: ShardingStrategy) -> TensorLayout:
        return held_layout(self.edge, source)

    def _gradient(self, target: ShardingStrategy) -> TensorLayout:
        return target.partial_layout(self.edge.target_tensor)

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

    def _bounds(self, held: Sequence[TensorLayout], gradients: Sequence[TensorLayout]) -> Array:
        """Seconds that no sequence of collectives beats, [held, gradients]: what a rank has to
        receive, at the rate of the fastest; of a parameter none.
        """
        if self.edge.source_tensor.kind == "parameter":
            return np.zeros((len(held), len(gradients)))
        num_dims = max(len(layout.dims) for layout in (*held, *gradients))
        has = self._parts(held, num_dims)[:, None]
        wants = self._parts(gradients, num_dims)[None]
        both = self.size / np.maximum(has, wants).prod(-1)
        there, back = self.size / wants.prod(-1) - both, self.size / has.prod(-1)
        # Every part of a sum comes from another rank too.
        is_sum = np.array([bool(layout.partial) for layout in gradients])
        seconds: Array = (there + np.where(is_sum, back, back - both)) / self._rate
        return seconds

    def _parts(self, layouts: Sequence[TensorLayout], num_dims: int) -> Array:
        """Parts of each dim, [layouts, dims]."""
        padded = (layout.of_dims(num_dims) for layout in layouts)
        return np.array([[self.mesh.ranks_over(axes) for axes in x.dims] for x in padded], float)

    @cached_property
    def _rate(self) -> float:
        return self.mesh.fastest_rate


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
