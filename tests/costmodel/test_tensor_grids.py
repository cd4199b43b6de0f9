"""Tensor parallelism on grids: volumes, states, work and activations are those of the papers."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.costmodel.communication.grid_volume import gemm_exchanges
from workbench.costmodel.communication.partial_gradients import partial_gradient_sums
from workbench.costmodel.compute.roofline import model_flops
from workbench.costmodel.inputs.layer_gemms import layer_gemms
from workbench.costmodel.inputs.rank_workload import Workload, workload
from workbench.costmodel.memory import activation_memory
from workbench.errors import PlanError
from workbench.plan.model.parameter_count import parameters
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner import estimate

GRIDS = [
    ("2d", [2, 2]),
    ("2d", [4, 4]),
    ("2.5d", [2, 2, 2]),
    ("2.5d", [4, 4, 2]),
    ("3d", [2, 2, 2]),
    ("3d", [4, 4, 4]),
]
BATCH = 64


def on_grid(
    algorithm: str, size: Any, model: str = "gpt3-6.7b", gpus: int = 64, /, **changes: Any
) -> ResolvedPlan:
    grid = {
        "strategy.tensor.algorithm": algorithm,
        "strategy.tensor.size": size,
        "training.micro_batch": BATCH,
    }
    return Plan.of(
        model, gpu="h100-sxm-80gb", gpus=gpus, strategy="ddp", set=grid | changes
    ).resolve()


def one_rank(model: str = "gpt3-6.7b") -> Workload:
    return workload(on_grid("1d", 1, model, 1))


def published(algorithm: str, size: list[int], m: float, n: float, k: float) -> float:
    """Elements that a rank receives for Y[m, n] = X[m, k] A[k, n] (2104.05343, 2105.14500,
    2105.14450).
    """
    q, d = size[0], size[2] if algorithm == "2.5d" else 1
    if algorithm == "3d":
        return (q - 1) * (m * k + k * n + m * n) / q**3
    return (q - 1) * (m * k / d + k * n) / q**2


@pytest.mark.parametrize("action", ["F", "B"])
@pytest.mark.parametrize(("algorithm", "size"), GRIDS)
def test_products_move_what_the_papers_say(algorithm: str, size: list[int], action: str) -> None:
    w, side = workload(on_grid(algorithm, size)), size[0]
    for own, whole in zip(layer_gemms(w, False), layer_gemms(one_rank(), False), strict=True):
        moved = sum(
            elements * calls * (side - 1) / side
            for _, elements, calls in gemm_exchanges(w, own, action)
        )
        expected = published(algorithm, size, whole.rows, whole.columns, whole.inner)
        assert moved == pytest.approx(expected * (1 if action == "F" else 2))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_copies_of_weights_add_their_gradients_once_a_step(depth: int) -> None:
    plan = on_grid("2.5d", [4, 4, depth], **{"training.global_batch": 64 * BATCH})
    w = workload(plan)
    *_, call = partial_gradient_sums(w)  # the others are over a column
    assert (call.count, call.group_size) == (depth > 1, depth)
    assert call.bytes == pytest.approx(
        float(w.param_counts.total.sum()) * 4 * (depth > 1)
    )  # fp32 gradients


@pytest.mark.parametrize("model", ["gpt3-6.7b", "llama-3-8b", "mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize(("algorithm", "size"), GRIDS)
def test_states_of_all_tensor_ranks_add_up_to_the_model(
    model: str, algorithm: str, size: list[int]
) -> None:
    plan = on_grid(algorithm, size, model)
    w, copies = workload(plan), size[2] if algorithm == "2.5d" else 1
    padding = (
        (w.vocab_rows * w.tiling.column_parts - plan.shape.vocab)
        * plan.shape.hidden
        * (2 - plan.shape.tied)
    )
    bare, whole = (
        parameters(plan.shape.model_copy(update={"biases": "none"})),
        parameters(plan.shape),
    )
    vectors = (
        whole.norms + whole.positions + whole.total - bare.total
    )  # alike along all sides but one
    if (moe := plan.shape.moe) and moe.score_bias:
        vectors += (plan.shape.layers - moe.first_dense) * moe.experts
    ranks = plan.sizes["tensor"] / copies
    expected = whole.total + padding + vectors * (ranks / size[0] - 1)
    assert float(w.param_counts.total.sum()) * ranks == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("model", ["gpt3-6.7b", "mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize(("algorithm", "size"), GRIDS)
def test_ranks_share_the_work_and_the_activations(
    model: str, algorithm: str, size: list[int]
) -> None:
    plan = on_grid(algorithm, size, model)
    w, one, ranks = workload(plan), one_rank(model), plan.sizes["tensor"]
    vocab = float(w.vocab_rows * w.tiling.column_parts / plan.shape.vocab)
    assert float(model_flops(w) / w.data) * ranks == pytest.approx(
        float(model_flops(one)), rel=2 * (vocab - 1) + 1e-12
    )
    if w.k_width == one.k_width / w.tiling.column_parts and plan.shape.moe is None:
        assert activation_memory.layer_activations(w).saved * ranks == pytest.approx(
            float(activation_memory.layer_activations(one).saved), rel=0.01
        )


def test_activations_fall_with_every_rank_where_1d_keeps_norms_and_residuals_whole() -> None:
    flat, square, cube = (
        activation_memory.layer_activations(workload(on_grid(kind, size))).saved
        for kind, size in (("1d", 8), ("2.5d", [2, 2, 2]), ("3d", [2, 2, 2]))
    )
    assert (
        square < 0.6 * flat and cube < 0.6 * flat
    )  # 34/8 against 10 + 24/8 of Table 2 in 2205.05198
    assert activation_memory.layer_activations(workload(on_grid("2d", [4, 4]))).saved < square


@pytest.mark.parametrize(
    ("algorithm", "size"), [("2d", [1, 1]), ("2.5d", [1, 1, 1]), ("3d", [1, 1, 1])]
)
def test_a_grid_of_one_rank_is_one_rank(algorithm: str, size: list[int]) -> None:
    grid, flat = (
        estimate(on_grid(kind, n, "gpt3-6.7b", 8)) for kind, n in ((algorithm, size), ("1d", 1))
    )
    assert grid.step_seconds == pytest.approx(flat.step_seconds, rel=1e-12)
    assert grid.peak_bytes_by_rank == flat.peak_bytes_by_rank


@pytest.mark.parametrize("preset", ["colossal-2d", "colossal-2.5d", "colossal-3d"])
@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
def test_presets_are_estimated(preset: str, model: str) -> None:
    profile = estimate(Plan.of(model, gpu="a100-sxm-80gb", gpus=64, strategy=preset))
    kinds = set(profile.collectives[profile.collectives.axis == "tensor"].kind)
    assert kinds >= (
        {"all_gather", "reduce_scatter"} if preset == "colossal-3d" else {"broadcast", "reduce"}
    )
    assert 0 < profile.notes["model_flops_utilisation"] < 1


def test_a_micro_batch_that_the_grid_cannot_split_is_refused_with_what_is_legal() -> None:
    with pytest.raises(PlanError) as error:
        on_grid("2.5d", [2, 2, 2], **{"training.micro_batch": 6})
    (problem,) = error.value.problems
    assert problem.field == "training.micro_batch" and "legal: 4, 8" in problem.message
