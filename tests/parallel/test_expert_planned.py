"""Estimates of MoE models equal what the engine does, call by call; what cannot be run is
refused.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.costmodel.test_against_rehearsal import small, traffic
from tests.parallel.test_expert import moe_plan
from workbench.plan.rules.check import check
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.profile import Profile
from workbench.rehearsal.rehearse import rehearse

MOE = {"experts": 8, "top_k": 2, "ffn": 192, "shared": 1, "first_dense": 1}
MODEL = {
    "layers": 4,
    "hidden": 128,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 384,
    "vocab": 512,
    "moe": MOE,
}
BIASED = MODEL | {"biases": "all", "mlp": "gelu", "norm": "layernorm"}
LIMITED = MODEL | {"moe": MOE | {"capacity": 1.1}}


@pytest.mark.slow
@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("model", "precision", "strategy", "gpus", "changes"),
    [
        (MODEL, "bf16", "single", 1, {}),
        (MODEL, "fp32", "ddp", 4, {"strategy.expert.size": 2}),
        (MODEL, "bf16", "expert-parallel", 4, {}),
        (BIASED, "fp32", "megatron-tp", 2, {}),
        (MODEL, "fp32", "megatron-sp", 2, {"strategy.recompute": "none"}),
        (LIMITED, "fp32", "expert-parallel", 2, {}),
        (MODEL, "fp32", "tensor-pipeline", 4, {}),
        (MODEL, "fp32", "zero-1", 2, {"strategy.expert.size": 2}),
        (MODEL, "fp32", "ring-attention", 2, {"strategy.expert.size": 2}),
        (MODEL, "fp32", "expert-parallel", 2, {"strategy.recompute": "selective"}),
    ],
    ids=str,
)
def test_peak_memory_and_collectives_equal_the_engines(
    model: dict[str, Any], precision: str, strategy: str, gpus: int, changes: dict[str, Any]
) -> None:
    plan = small(model, strategy, gpus, precision).replace(**changes)
    estimated, rehearsed = estimate(plan), rehearse(plan)
    assert estimated.peak_bytes_by_rank == pytest.approx(rehearsed.peak_bytes_by_rank, rel=0.02)
    assert traffic(estimated) == traffic(rehearsed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"strategy.recompute": "full"},
        {"strategy.data.zero": 3},
        {"strategy.data.zero": 2, "strategy.data.reduce": "microbatch", "strategy.data.shard": 2},
    ],
    ids=str,
)
def test_collectives_beside_recomputation_and_shards(changes: dict[str, Any]) -> None:
    plan = small(MODEL, "expert-parallel", 4, "fp32").replace(
        **{"strategy.expert.size": 2, **changes}
    )
    assert traffic(estimate(plan)) == traffic(rehearse(plan))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "gpus"), [("single", 1), pytest.param("megatron-sp", 2, marks=pytest.mark.sweep)]
)
def test_a_recomputed_layer_keeps_its_input_and_its_choices(strategy: str, gpus: int) -> None:
    def activations_of_a_layer(instrument: Callable[[Plan], Profile]) -> float:
        found = []
        for layers in (4, 8):
            shape = MODEL | {"layers": layers, "moe": {"experts": 8, "top_k": 6, "ffn": 192}}
            plan = small(shape, strategy, gpus, "bf16").replace(**{"strategy.recompute": "full"})
            rows = instrument(plan).memory
            rows = rows[(rows.moment == "peak") & (rows.category == "activations")]
            rows = rows[(rows["rank"] == 0) & (rows.step == rows.step.max())]
            found.append(int(rows.bytes.sum()))
        return (found[1] - found[0]) / 4

    rehearsed = activations_of_a_layer(rehearse)  # with the counts of 8 experts, 64 bytes
    assert activations_of_a_layer(estimate) == pytest.approx(rehearsed - 8 * 8, abs=1)


def test_number_and_bytes_of_expert_collectives() -> None:
    """4 microbatches x 3 layers: counts, then rows there and back; and the same way for
    gradients.
    """
    plan = small(MODEL, "expert-parallel", 2, "fp32")
    rows = {
        key[1:]: count for key, count in traffic(rehearse(plan, [0])).items() if key[1] == "expert"
    }
    size, calls = 2 * 128 * 128 * 2 * 4, plan.resolve().num_microbatches * 3
    assert rows == {
        ("expert", "all_to_all", 2, "int64", 8 * 8, "F"): calls,
        ("expert", "all_to_all", 2, "fp32", size, "F"): 2 * calls,
        ("expert", "all_to_all", 2, "fp32", size, "B"): 2 * calls,
    }


@pytest.mark.parametrize(
    ("plan", "field", "words"),
    [
        (
            lambda: moe_plan(data=4, expert=3),
            "strategy.expert.size",
            "it divides 4 experts.* = 4; legal: .*2, 4",
        ),
        (lambda: moe_plan(data=2, expert=4), "strategy.expert.size", "data x context = 2"),
        (lambda: moe_plan(moe={"top_k": 5}), "model.moe.top_k", "is 5 of 4 experts; legal: 1 to 4"),
        (lambda: moe_plan(moe={"first_dense": 5}), "model.moe.first_dense", "is 5 of 4 layers"),
        (
            lambda: moe_plan(moe={"top_k": 1, "renormalise": True}),
            "model.moe.renormalise",
            "top_k 1.*legal: false",
        ),
        (
            lambda: moe_plan(tensor=4, moe={"ffn": 3}),
            "strategy.tensor.size",
            "more than moe.ffn = 3; legal.*: 1 to 3",
        ),
    ],
    ids=["experts", "replicas", "top_k", "first_dense", "renormalise", "width"],
)
def test_illegal_expert_plans_are_refused(plan: Any, field: str, words: str) -> None:
    found = [problem for problem in check(plan()) if problem.field == field]
    assert found and re.search(words, found[0].message), found


@pytest.mark.parametrize(("algorithm", "size"), [("2d", [2, 2]), ("3d", [2, 2, 2])])
def test_moe_on_a_grid_is_estimated_but_not_run(algorithm: str, size: list[int]) -> None:
    grid = {
        "strategy.tensor.algorithm": algorithm,
        "strategy.tensor.size": size,
        "training.micro_batch": 4,
    }
    plan = moe_plan(data=8, changes=grid).resolve()
    (problem,) = unsupported(plan, "run")
    assert problem.field == "strategy.tensor.algorithm"
    assert re.search(
        r"4 experts needs the unsharded width; legal: '1d' with tensor.size 1, 2, 4, or",
        problem.message,
    )
    assert not unsupported(plan, "estimate")


def test_capacity_of_sequences_that_ranks_share_is_refused() -> None:
    plan: Plan = moe_plan(data=2, moe={"capacity": 1.0}, changes={"strategy.context.size": 2})
    assert [problem.field for problem in unsupported(plan.resolve(), "run")] == [
        "model.moe.capacity"
    ]
