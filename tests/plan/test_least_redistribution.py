"""Redistribution: least seconds, then fewest collectives, on every pair of layouts."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from tests.redistribution_pairs import EverySequence, layouts, together
from workbench.plan.operators.least_redistribution import LeastRedistribution
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
    every = EverySequence(sizes, num_dims, grid.seconds, SIZE)
    least = LeastRedistribution(sizes, grid.seconds)
    for held in layouts(len(sizes), num_dims, partial=True):
        for wanted in layouts(len(sizes), num_dims):
            steps = least.steps(held, wanted, SIZE)
            calls = [step for step in steps if step.kind != "slice"]
            found = sum(round(least.step_seconds(step) * 1e15) for step in calls), len(calls)
            alike = frozenset(
                pair
                for pair in pairwise(range(len(sizes)))
                if together(held, *pair) and together(wanted, *pair)
            )
            assert found == every.least(held, wanted, alike), (held, wanted, steps)
            if links == "levels":  # of equal links several small rings pay less latency
                assert found[0] == every.least(held, wanted)[0], (held, wanted, steps)


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
