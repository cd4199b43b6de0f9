"""Modules of tensor grids against dense ones, block by block; and faults planted in them, which
verification finds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parallel.test_tensor_grids import CUBE, DEEP, SQUARE, on
from workbench.engine.verify.equivalence import verify
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.models.seams import AddNorm
from workbench.parallel import apply_strategy
from workbench.parallel.mesh import GRADIENT_GROUP_SUFFIX, Mesh, MeshAxis, build_mesh
from workbench.parallel.tensor.apply_tensor import tensor_reduction_axes
from workbench.parallel.tensor.grid import grid_norm, summa, tensor_3d
from workbench.parallel.tensor.grid.grid_collectives import PendingMove
from workbench.parallel.tensor.grid.grid_norm import GridParallelNorm
from workbench.parallel.tensor.grid.summa import SquareGrid
from workbench.parallel.tensor.grid.tensor_3d import CubeGrid

B, T, K, N = 8, 3, 8, 12


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(run: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Result, and the gradients of inputs under a drawn gradient of the result."""
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    y = run(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, drawn(*y.shape, seed=9))]


def chunk_of(x: Tensor, dim: int, axis: MeshAxis) -> Tensor:
    return x.chunk(axis.size, dim)[axis.index]


def furthest(mine: list[Tensor], whole: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(mine, whole, strict=True))


def on_square(mesh: Mesh) -> float:
    grid, x, w = SquareGrid.of(mesh), drawn(B, T, K), drawn(N, K, seed=1)
    y, x_gradient, w_gradient = dense(F.linear, x, w)
    g = grid.own(chunk_of(drawn(B, T, N, seed=9), 2, grid.column))
    mine = [
        grid.own(chunk_of(x, 2, grid.column)),
        chunk_of(chunk_of(w, 0, grid.column), 1, grid.row),
    ]
    mine = [a.clone().requires_grad_() for a in mine]
    own = summa.summa(mine[0], mine[1], grid)
    gradients = list(torch.autograd.grad(own, mine, g))
    if grid.depth is not None:
        torch.distributed.all_reduce(gradients[1], group=grid.depth.group)
    return furthest(
        [own.detach(), *gradients],
        [
            grid.own(chunk_of(y, 2, grid.column)),
            grid.own(chunk_of(x_gradient, 2, grid.column)),
            chunk_of(chunk_of(w_gradient, 0, grid.column), 1, grid.row),
        ],
    )


def on_cube(mesh: Mesh, swapped: bool = False) -> float:
    grid = CubeGrid.of(mesh).swapped() if swapped else CubeGrid.of(mesh)
    x, w = drawn(B, T, K), drawn(N, K, seed=1)
    y, x_gradient, w_gradient = dense(F.linear, x, w)

    def entering(z: Tensor) -> Tensor:
        return grid.own(chunk_of(z, 2, grid.output), grid.input)

    def leaving(z: Tensor) -> Tensor:
        return grid.own(chunk_of(z, 2, grid.input), grid.output)

    def weight(z: Tensor) -> Tensor:
        return chunk_of(chunk_of(chunk_of(z, 0, grid.input), 0, grid.weight), 1, grid.output)

    mine = [entering(x).clone().requires_grad_(), weight(w).clone().requires_grad_()]
    own = tensor_3d.matmul_3d(mine[0], mine[1], grid, N // grid.input.size)
    gradients = list(torch.autograd.grad(own, mine, leaving(drawn(B, T, N, seed=9)).contiguous()))
    return furthest(
        [own.detach(), *gradients], [leaving(y), entering(x_gradient), weight(w_gradient)]
    )


def over_width(kind: str, mesh: Mesh) -> float:
    """Values far from zero, so that differences of sums would cancel."""
    axis = mesh["tensor.0"]
    module = AddNorm(kind, K, 1e-5, bias=kind == "layernorm").double()
    x, own = (
        drawn(B, T, K) + 1e4,
        [drawn(K, seed=2), drawn(K, seed=3)][: len(list(module.parameters()))],
    )

    def run(x: Tensor, *vectors: Tensor) -> Tensor:
        names = [name for name, _ in module.named_parameters()]
        result: Tensor = torch.func.functional_call(module, dict(zip(names, vectors)), (x, None))[0]
        return result

    whole = dense(run, x, *own)
    parts = [nn.Parameter(chunk_of(v, 0, axis).clone()) for v in own]
    split = GridParallelNorm(parts[0], parts[1] if len(parts) > 1 else None, kind, 1e-5, K, axis)
    mine = chunk_of(x, 2, axis).clone().requires_grad_()
    y, _ = split(mine, None)
    gradients = torch.autograd.grad(y, [mine, *parts], chunk_of(drawn(B, T, K, seed=9), 2, axis))
    expected = [
        chunk_of(whole[0], 2, axis),
        chunk_of(whole[1], 2, axis),
        *(chunk_of(v, 0, axis) for v in whole[2:]),
    ]
    return max(
        float(((a - b) / b.abs().max()).abs().max())
        for a, b in zip([y.detach(), *gradients], expected)
    )


@pytest.mark.parametrize(
    ("grid", "compare"),
    [
        (SQUARE, on_square),
        (DEEP, on_square),
        (CUBE, on_cube),
        (CUBE, partial(on_cube, swapped=True)),
    ],
    ids=["2d", "2.5d", "3d", "3d swapped"],
)
def test_grid_gemms_equal_dense_ones(
    grid: tuple[str, list[int]], compare: Callable[[Mesh], float]
) -> None:
    plan = on(grid).resolve()
    gaps = run_ranks(plan.world_size, lambda rank: compare(build_mesh(plan, rank)))
    assert max(gaps) < 1e-12, gaps


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norms_over_a_sharded_width_equal_dense_ones(kind: str) -> None:
    plan = on(SQUARE).resolve()
    gaps = run_ranks(plan.world_size, lambda rank: over_width(kind, build_mesh(plan, rank)))
    assert max(gaps) < 1e-10, gaps


def alone(x: Tensor, axis: MeshAxis) -> Tensor:
    return x


def still(x: Tensor, axis: MeshAxis, root: int) -> PendingMove:
    return PendingMove(dist.broadcast, x, replace(axis, size=1))


def scattered(x: Tensor, axis: MeshAxis) -> Tensor:
    return x.chunk(axis.size)[axis.index].clone()


MUTATIONS: dict[str, tuple[tuple[str, list[int]], Any, str, Any]] = {
    "a missing broadcast": (SQUARE, summa, "broadcast", still),
    "a partial sum that is not reduced": (SQUARE, summa, "reduce", still),
    "a tied block that is not exchanged": (
        SQUARE,
        summa,
        "swap_with_gradient",
        lambda x, axis, peer: x,
    ),
    "statistics of the local slice": (SQUARE, grid_norm, "all_reduce", alone),
    "a missing gather": (CUBE, tensor_3d, "all_gather", lambda x, axis: torch.cat([x] * axis.size)),
    "a partial sum that is not scattered": (CUBE, tensor_3d, "reduce_scatter", scattered),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", MUTATIONS)
def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    grid, module, name, instead = MUTATIONS[fault]
    monkeypatch.setattr(module, name, instead)
    failing(verify(on(grid, layers=1, tied="tied" in fault)))


@pytest.mark.parametrize(
    ("grid", "side"), [(DEEP, "tensor.2"), (SQUARE, "tensor.1"), (CUBE, "tensor.1")], ids=str
)
def test_gradients_not_summed_along_a_grid_axis_are_found(
    monkeypatch: pytest.MonkeyPatch, grid: tuple[str, list[int]], side: str
) -> None:
    original = tensor_reduction_axes

    def without(layouts: Any, plan: Any, mesh: Mesh) -> dict[str, tuple[MeshAxis, ...]]:
        summed = original(layouts, plan, mesh)
        return {
            name: tuple(axis for axis in axes if axis.name != side + GRADIENT_GROUP_SUFFIX)
            for name, axes in summed.items()
        }

    monkeypatch.setattr(apply_strategy, "tensor_reduction_axes", without)
    worst = failing(verify(on(grid, layers=1)))
    assert side == "tensor.2" or "norm" in worst["tensor"]


def test_a_bias_added_by_every_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: summa.SummaLinear, x: Tensor) -> Tensor:
        y = summa.summa(x, self.weight, self.grid)
        return y if self.bias is None else y + self.grid.column.size * self.bias

    monkeypatch.setattr(summa.SummaLinear, "forward", forward)
    failing(verify(on(SQUARE, layers=1, biases="all")))


def test_a_loss_counted_on_every_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.engine.session.counts_own_loss", lambda mesh: True)
    assert failing(verify(on(CUBE, layers=1)))["kind"] == "loss"


def failing(answer: dict[str, Any]) -> dict[str, Any]:
    assert not answer["passed"], answer
    worst: dict[str, Any] = answer["worst"]
    assert worst["relative"] > 100 * answer["tolerance"] and worst["tensor"]
    return worst
