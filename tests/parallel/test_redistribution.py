"""Redistribution on real ranks: every pair of layouts against slices of the global tensor, and the
gradient back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.redistribution_pairs import layouts
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.operators.redistribution import RedistributionGrid
from workbench.plan.operators.redistribution_moves import neighbors
from workbench.plan.operators.tensor_layout import TensorLayout
from workbench.planner.autoshard import ideal_machine
from workbench.planner.autoshard.device_mesh import logical_mesh

Pair = tuple[TensorLayout, TensorLayout, TensorLayout]
"""How a tensor is held and wanted, and how its gradient is left."""
LEVELS = (1e8, 4e8, 3e9)
"""Bytes/s of the levels of a mesh, outermost first."""
BLOCK = 8
"""Held layouts of a case."""


def pairs(sizes: tuple[int, ...], num_dims: int, block: int | None = None) -> list[Pair]:
    """All pairs, the gradient partial over drawn axes that do not shard it."""
    drawn, found = random.Random(0), []
    for held, wanted in product(
        layouts(len(sizes), num_dims, partial=True), layouts(len(sizes), num_dims)
    ):
        free = (a for a in range(len(sizes)) if a not in wanted.sharding)
        terms = tuple(a for a in free if drawn.random() < 0.5)
        found.append((held, wanted, wanted._replace(partial=terms)))
    wide = len(found) // len(layouts(len(sizes), num_dims, partial=True)) * BLOCK
    return found if block is None else found[block * wide :][:wide]


def on_ranks(sizes: tuple[int, ...], found: Sequence[Pair], rank: int) -> list[str]:
    """Pairs of which this rank's part, or that of the gradient, is wrong."""
    grid = redistribution_grid(sizes, rank)
    return [str(pair) for pair in found if not is_right(grid, pair)]


def redistribution_grid(sizes: tuple[int, ...], rank: int) -> RedistributionGrid:
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    axes = {}
    for run in neighbors(range(len(sizes))):
        last = tuple(range(-len(run), 0))
        groups = ranks.movedim(run, last).reshape(-1, math.prod(sizes[a] for a in run)).tolist()
        group, _ = dist.new_subgroups_by_enumeration(groups)
        mine = next(each for each in groups if rank in each)
        axes[run] = MeshAxis(str(run), len(mine), mine.index(rank), tuple(mine), group, "tensor")
    machine = ideal_machine(1e12, LEVELS[: len(sizes)], 1e-6)
    device = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
    return RedistributionGrid(device, axes, logical_mesh(sizes, machine).redistribution)


def is_right(grid: RedistributionGrid, pair: Pair) -> bool:
    held, wanted, gradient = pair
    shape = [24, 16, 8, 8][: len(held.dims)] if 3 not in grid.least.sizes else [12] * 3
    shape = shape[: len(held.dims)]
    x = torch.arange(math.prod(shape), dtype=torch.float64).view(shape) + 1
    own = part(x, held, grid).requires_grad_()
    y = grid.redistribute(own, held, wanted, gradient)
    (back,) = torch.autograd.grad((y + 0), own, part(3 * x, gradient, grid))
    return torch.equal(y, part(x, wanted, grid)) and torch.equal(
        back, part(3 * x, held.summed, grid)
    )


def part(x: Tensor, layout: TensorLayout, grid: RedistributionGrid) -> Tensor:
    """This rank's part of the global tensor; of a sum the term that is 1, 2, ... times it, and on
    the last rank what is missing.
    """
    for dim, axes in enumerate(layout.dims):
        for axis in axes:
            one = grid.axes[(axis,)]
            x = x.chunk(one.size, dim)[one.index]
    for axis in layout.partial:
        one = grid.axes[(axis,)]
        missing = 1 - sum(range(1, one.size))
        x = x * (one.index + 1 if one.index < one.size - 1 else missing)
    return x.clone()


@pytest.mark.parametrize(
    ("sizes", "num_dims"),
    [
        ((2,), 3),
        ((2, 2), 2),
        pytest.param((2, 2), 3, marks=pytest.mark.slow),
        pytest.param((3, 2), 2, marks=pytest.mark.slow),
        pytest.param((3, 2), 3, marks=pytest.mark.sweep),
    ],
)
def test_every_pair(sizes: tuple[int, ...], num_dims: int) -> None:
    found = pairs(sizes, num_dims)
    wrong = run_ranks(math.prod(sizes), partial(on_ranks, sizes, found), seconds=300)
    assert wrong == [[]] * math.prod(sizes)


@pytest.mark.drawn(2)
@pytest.mark.slow
@pytest.mark.parametrize("block", range(64 // BLOCK))
def test_pairs_of_matrices_on_three_levels(block: int) -> None:
    found = pairs((2, 2, 2), 2, block)
    assert found and run_ranks(8, partial(on_ranks, (2, 2, 2), found), seconds=300) == [[]] * 8


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize("block", range(-(-125 // BLOCK)))
def test_pairs_of_three_dims_on_three_levels(block: int) -> None:
    found = pairs((2, 2, 2), 3, block)
    assert found and run_ranks(8, partial(on_ranks, (2, 2, 2), found), seconds=600) == [[]] * 8


def uneven(rank: int) -> str:
    grid = redistribution_grid((2,), rank)
    with pytest.raises(ValueError, match=r"dim 0 .* has 3 entries, which 2 ranks do not divide"):
        grid.run(torch.ones(3), TensorLayout(((),)), TensorLayout(((0,),)))
    return "refused"


def test_a_dim_that_does_not_divide_is_refused() -> None:
    assert run_ranks(2, uneven) == ["refused"] * 2
