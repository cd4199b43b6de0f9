"""Neighboring mesh axes that lie alike in two layouts of a tensor: one collective spans them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from workbench.plan.operators.tensor_layout import Dims, TensorLayout

MAX_AXES = 3
"""Axes of which every state is searched. Of more, those that lie alike are one, and those that stay
where they are take no part.
"""


@dataclass(frozen=True)
class AlikeAxes:
    """Two layouts on a mesh, whose axes are numbered anew: those of one rank are left out, and of
    many axes those that lie alike are one; those that stay have size 1.
    """

    runs: tuple[tuple[int, ...], ...]
    """Axes of the mesh that each axis stands for."""
    sizes: tuple[int, ...]
    held: TensorLayout
    wanted: TensorLayout
    outer: Dims
    """For each dim the axes that shard it in both layouts and stay, outermost first."""

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """For each dim the least number that its parts in both layouts divide."""
        two = (layout.num_parts(self.sizes) for layout in (self.held, self.wanted))
        return tuple(map(math.lcm, *two))

    def expanded(self, runs: Sequence[int]) -> tuple[int, ...]:
        """The mesh's axes."""
        return tuple(axis for run in runs for axis in self.runs[run])

    def layout(self, numbered: TensorLayout) -> TensorLayout:
        """A layout over the mesh's axes."""
        dims = (outer + self.expanded(axes) for outer, axes in zip(self.outer, numbered.dims))
        return TensorLayout(tuple(dims), self.expanded(numbered.partial))


def alike_axes(held: TensorLayout, wanted: TensorLayout, sizes: Sequence[int]) -> AlikeAxes:
    """Two layouts on a mesh of these sizes."""
    live = [axis for axis, size in enumerate(sizes) if size > 1]
    many = len(live) > MAX_AXES
    runs = tuple(_runs(live, held, wanted) if many else [(a,) for a in live])
    over = [_over_runs(layout, runs) for layout in (held, wanted)]
    counts = [math.prod(sizes[axis] for axis in run) for run in runs]
    outer = tuple(_common(*dims) if many else () for dims in zip(*(x.dims for x in over)))
    taken = {axis for x in over for axis in (*x.sharding, *x.partial)}
    stays = {*sum(outer, ())} | ({*range(len(runs))} - taken if many else set())
    inner = [x._replace(dims=tuple(d[len(o) :] for d, o in zip(x.dims, outer))) for x in over]
    return AlikeAxes(
        runs,
        tuple(1 if run in stays else count for run, count in enumerate(counts)),
        inner[0],
        inner[1],
        tuple(tuple(axis for run in dim for axis in runs[run]) for dim in outer),
    )


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The outermost axes that a dim has in both layouts."""
    same = [x == y for x, y in zip(a, b)] + [False]
    return a[: same.index(False)]


def _runs(
    axes: Sequence[int], held: TensorLayout, wanted: TensorLayout
) -> Iterator[tuple[int, ...]]:
    run = tuple(axes[:1])
    for pair in pairwise(axes):
        if held.has_alike(*pair) and wanted.has_alike(*pair):
            run += pair[1:]
        else:
            yield run
            run = pair[1:]
    yield run


def _over_runs(layout: TensorLayout, runs: Sequence[tuple[int, ...]]) -> TensorLayout:
    number = {run[0]: index for index, run in enumerate(runs)}
    return TensorLayout(
        tuple(tuple(number[a] for a in axes if a in number) for axes in layout.dims),
        tuple(number[a] for a in layout.partial if a in number),
    )
