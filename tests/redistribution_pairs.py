"""Layouts of a tensor on small meshes, and the least cost of redistributing it, found by trying
every sequence of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations, product

import numpy as np

from workbench.plan.operators.tensor_layout import TensorLayout

Price = Callable[[str, float, tuple[int, ...]], int]
"""(kind of collective, bytes of its larger side on a rank, axes) -> femtoseconds."""
Costs = np.ndarray[tuple[int, int], np.dtype[np.int64]]
LONGEST = 6
"""Steps of the sequences that are tried."""
NEVER = np.iinfo(np.int64).max // 4
COUNTS = 64
"""A cost is femtoseconds times this, plus collectives."""


def layouts(num_axes: int, num_dims: int, partial: bool = False) -> list[TensorLayout]:
    """All layouts whose dims have their axes in the mesh's order."""
    choices: list[int | None] = [None, *range(num_dims), *([num_dims] if partial else [])]
    return [
        TensorLayout.placed(
            [None if at == num_dims else at for at in each],
            num_dims,
            [axis for axis, at in enumerate(each) if at == num_dims],
        )
        for each in product(choices, repeat=num_axes)
    ]


def one_step(
    a: TensorLayout, b: TensorLayout, num_axes: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(kind, axes) of the steps that lead from `a` to `b`."""
    runs = [tuple(range(i, j)) for i in range(num_axes) for j in range(i + 1, num_axes + 1)]
    gone, come = ({*x.sharding} - {*y.sharding} for x, y in ((a, b), (b, a)))
    summed = {*a.partial} - {*b.partial}
    if {*b.partial} - {*a.partial}:
        return
    if not summed and not gone and come and not come & {*a.partial} and _begins(a, b):
        yield "slice", tuple(sorted(come))
    for run in runs:
        if {*run} == gone and not come and not summed and _begins(b, a):
            yield "all_gather", run
        if {*run} == summed and a.dims == b.dims:
            yield "all_reduce", run
        if {*run} == summed == come and not gone and _begins(a, b):
            yield "reduce_scatter", run
        if not gone | come | summed and {*run} <= {*a.sharding} and a != b:
            kept = [tuple(axis for axis in axes if axis not in run) for axes in a.dims]
            outer = TensorLayout(tuple(kept))
            if _begins(outer, a) and _begins(outer, b):
                yield "all_to_all", run


def _begins(a: TensorLayout, b: TensorLayout) -> bool:
    """Whether each dim of `b` has the axes of `a`, then others."""
    return all(y[: len(x)] == x for x, y in zip(a.dims, b.dims))


@dataclass(frozen=True)
class EverySequence:
    """All states of a tensor on a mesh, and what it costs to go from each to each in one step."""

    sizes: tuple[int, ...]
    num_dims: int
    price: Price
    size: float

    @cached_property
    def states(self) -> list[TensorLayout]:
        """All layouts, in any order of axes, partial over any."""
        axes, found = range(len(self.sizes)), set()
        for at in product(range(self.num_dims + 2), repeat=len(self.sizes)):
            partial = tuple(a for a in axes if at[a] == self.num_dims + 1)
            for order in permutations(axes):
                dims = (tuple(a for a in order if at[a] == d) for d in range(self.num_dims))
                found.add(TensorLayout(tuple(dims), partial))
        return sorted(found)

    @cached_property
    def costs(self) -> Costs:
        """[from, to] of the cheapest step."""
        found = np.full((len(self.states),) * 2, NEVER)
        for (i, a), (j, b) in product(enumerate(self.states), repeat=2):
            steps = one_step(a, b, len(self.sizes))
            found[i, j] = min((self._cost(*step, a, b) for step in steps), default=NEVER)
        return found

    def _cost(self, kind: str, axes: tuple[int, ...], a: TensorLayout, b: TensorLayout) -> int:
        if kind == "slice":
            return 0
        larger = max(self.size / math.prod(x.num_parts(self.sizes)) for x in (a, b))
        return self.price(kind, larger, axes) * COUNTS + 1

    def least(self, held: TensorLayout, wanted: TensorLayout) -> tuple[int, int]:
        """(femtoseconds, collectives) of the best sequence whose states divide no dim further than
        both ends do together.
        """
        parts = tuple(
            math.lcm(a, b) for a, b in zip(held.num_parts(self.sizes), wanted.num_parts(self.sizes))
        )
        legal = [
            i
            for i, state in enumerate(self.states)
            if all(n % p == 0 for n, p in zip(parts, state.num_parts(self.sizes)))
        ]
        costs = self.costs[np.ix_(legal, legal)]
        at = [self.states[i] for i in legal]
        best = np.full(len(legal), NEVER)
        best[at.index(held)] = 0
        for _ in range(LONGEST):
            best = np.minimum(best, (best[:, None] + costs).min(axis=0))
        least = int(best[at.index(wanted)])
        return least // COUNTS, least % COUNTS
