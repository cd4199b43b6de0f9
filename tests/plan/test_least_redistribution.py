"""Redistribution: least seconds, then fewest collectives, on every pair of layouts."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest

from tests.redistribution_pairs import EverySequence, layouts
from workbench.plan.operators.tensor_layout import TensorLayout
from workbench.planner.autoshard import ideal_machine
from workbench.planner.autoshard.device_mesh import LogicalMesh, logical_mesh

SIZE = 3 * 2.0**20
"""Bytes of the unsharded tensor."""
LEVELS = (1e9, 8e9, 40e9)
"""Bytes/s of the levels of a mesh, outermost first."""


def mesh(sizes: tuple[int, ...], links: str) -> LogicalMesh:
    bandwidth = LEVELS[: len(sizes)] if links == "levels" else 8e9
    return logical_mesh(sizes, ideal_machine(1e12, bandwidth, 5e-6))


SLOW = pytest.mark.slow
MESHES = [
    *[((2,), dims, "equal") for dims in (1, 2, 3)],
    *[((2, 2), dims, links) for dims in (1, 2) for links in ("equal", "levels")],
    *[((3, 2), 2, links) for links in ("equal", "levels")],
    ((2, 2), 3, "levels"),
    ((2, 2, 2), 1, "levels"),
    *[pytest.param((2, 2, 2), 2, links, marks=SLOW) for links in ("equal", "levels")],
    *[pytest.param((2, 2, 2), 3, links, marks=SLOW) for links in ("equal", "levels")],
    pytest.param((3, 2), 3, "levels", marks=SLOW),
]


@pytest.mark.parametrize(("sizes", "num_dims", "links"), MESHES)
def test_no_sequence_of_steps_costs_less(sizes: tuple[int, ...], num_dims: int, links: str) -> None:
    grid = mesh(sizes, links)
    every = EverySequence(sizes, num_dims, partial(ring_by_ring, grid), SIZE)
    for held in layouts(len(sizes), num_dims, partial=True):
        for wanted in layouts(len(sizes), num_dims):
            steps = grid.redistribution.steps(held, wanted, SIZE)
            calls = [(s.kind, s.bytes, s.axes) for s in steps if s.kind != "slice"]
            compared = sum(ring_by_ring(grid, *call) for call in calls)
            assert (compared, len(calls)) == every.least(held, wanted), (held, wanted, steps)
            if links == "levels":  # what is compared is what is priced
                priced = sum(grid.seconds(*call) for call in calls)
                assert compared == pytest.approx(1e15 * priced, rel=1e-9, abs=1)


def ring_by_ring(grid: LogicalMesh, kind: str, size: float, axes: tuple[int, ...]) -> int:
    """Femtoseconds of a collective as rings along each axis, the innermost first; an all-to-all
    over axes of equal links, which is no ring, is one.
    """
    if kind == "all_to_all" and len({grid.axes[axis].link for axis in axes}) == 1:
        return round(1e15 * grid.seconds(kind, size, axes))
    inner = (() if kind == "all_to_all" else axes[at + 1 :] for at in range(len(axes)))
    sizes = (size / grid.ranks_over(within) for within in inner)
    return sum(round(1e15 * grid.seconds(kind, n, [axis])) for n, axis in zip(sizes, axes))


def test_a_small_sum_takes_no_detour() -> None:
    """As one ring an all-reduce of 4 ranks has 6 hops, two of 2 ranks have 4."""
    grid = logical_mesh(8, ideal_machine(1e12, 1e11, 6e-6))
    held = TensorLayout(((0,), ()), (1, 2))
    (only,) = grid.redistribution.steps(held, held.summed, 2.0**17)
    assert (only.kind, only.axes) == ("all_reduce", (1, 2))


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (2, 1, 3, 2, 2)])
def test_steps_of_many_axes_lead_from_end_to_end(sizes: tuple[int, ...]) -> None:
    grid, drawn = logical_mesh(sizes, ideal_machine(1e12, 8e9, 5e-6)), random.Random(0)
    every, ends = layouts(len(sizes), 2, partial=True), layouts(len(sizes), 2)
    for held, wanted in zip(drawn.choices(every, k=60), drawn.choices(ends, k=60)):
        at = held
        for step in grid.redistribution.steps(held, wanted, SIZE):
            assert step.before == SIZE / math.prod(at.num_parts(sizes))
            assert real(step.source, sizes) == real(at, sizes)
            at = step.target
        assert real(at, sizes) == real(wanted, sizes)


def real(layout: TensorLayout, sizes: tuple[int, ...]) -> TensorLayout:
    """Without axes of one rank."""
    dims = (tuple(a for a in axes if sizes[a] > 1) for axes in layout.dims)
    return TensorLayout(tuple(dims), tuple(a for a in layout.partial if sizes[a] > 1))
