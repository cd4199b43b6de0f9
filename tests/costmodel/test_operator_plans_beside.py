"""Estimates of operator strategies beside other choices of a plan are what rehearsal does."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from tests.costmodel.test_operator_plans import (
    agrees,
    calls,
    drawn_shape,
    on,
    peaks,
    with_drawn_operators,
)
from tests.parallel.small import CHUNKS, GPT, LLAMA
from tests.parallel.test_operators import ROWS, megatron
from workbench.plan.rules.strategy import float8_rules
from workbench.plan.schema import Plan, build_plan
from workbench.planner import estimate

RECOMPUTE: list[Any] = ["none", "none", "full", "selective", ["blocks.*.mlp"], [0, 2]]
SPLIT = {"strategy.pipeline.schedule": "zb-h1", "strategy.recompute": ["blocks.*.mlp"]}
RING = {"strategy.context.size": 2, "training.dropout": 0.1, "cluster.gpus": 4}
MOE = {**LLAMA, "biases": "all", "moe": {"experts": 4, "top_k": 2, "ffn": 128, "shared": 1}}
OF_ATTENTION = {name: form for name, form in megatron(2).items() if ".mlp." not in name}
CASES = {
    "a split backward": on(2, 2, operators=ROWS, shape=GPT, **SPLIT),
    "context and dropout": on(2, operators=megatron(2), shape=LLAMA, **RING),
    "experts without a strategy": on(2, operators={"head": megatron(2)["head"]}, shape=MOE),
    "experts' width": on(2, operators=OF_ATTENTION | {"blocks.*.mlp": "((1,),(2,))"}, shape=MOE),
}


@pytest.mark.parametrize("name", CASES)
def test_an_estimate_is_what_every_rank_does(name: str) -> None:
    agrees(CASES[name])


BY_THREE = {"blocks.*.mlp.[gu]*": "((1,1),(1,3))", "blocks.*.mlp.down": "((1,3),(3,1))"}
ODD_SHAPES: dict[str, dict[str, int]] = {
    "six layers": {"layers": 6, "hidden": 72, "heads": 6, "ffn": 186, "vocab": 507},
    "seven heads": {"layers": 3, "hidden": 70, "heads": 7, "ffn": 189, "vocab": 510},
    "nine layers": {"layers": 9, "hidden": 60, "heads": 6, "ffn": 99, "vocab": 333},
}
BATCHES = {"one": (6, 3), "two": (12, 3), "six": (12, 1)}
"""Microbatches of a step -> (global batch, micro-batch)."""
OFFLOADED: list[tuple[str, str, str, str, dict[str, Any]]] = [
    ("zero-offload", "six layers", "full", "two", {}),
    ("zero-offload", "six layers", "none", "two", {}),
    ("zero-offload", "seven heads", "selective", "one", {}),
    ("zero-offload", "seven heads", "full", "six", {"bucket_mib": 0.5}),
    ("zero-offload", "nine layers", "none", "two", {"bucket_mib": 0.2, "in_flight": 3}),
    ("zero-2", "six layers", "full", "one", {"bucket_mib": 0.5}),
    ("zero-infinity", "six layers", "full", "two", {}),
    ("zero-infinity", "seven heads", "selective", "six", {}),
    ("zero-infinity", "nine layers", "none", "six", {}),
    ("zero-infinity", "nine layers", "full", "two", {"in_flight": 3}),
    ("zero-3", "nine layers", "full", "six", {}),
]


@pytest.mark.parametrize(
    ("preset", "shape", "recompute", "batch", "data"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (at % 5 > 0))
        for at, case in enumerate(OFFLOADED)
    ],
)
def test_gradients_that_leave_are_counted_as_they_do(
    preset: str, shape: str, recompute: str, batch: str, data: dict[str, Any]
) -> None:
    """Buckets of a microbatch's gradients, and their shards on the way to the host and back."""
    whole, micro = BATCHES[batch]
    strategy = {"preset": preset, "tensor": {"size": 3}, "recompute": recompute}
    agrees(
        build_plan(
            {
                "model": ODD_SHAPES[shape],
                "cluster": {"gpu": "local", "gpus": 6},
                "strategy": {**strategy, "operators": BY_THREE, "data": data},
                "training": {"sequence_length": 36, "global_batch": whole, "micro_batch": micro},
            }
        )
    )


def on_gpus(model: str, tensor: int, operators: dict[str, str], **strategy: Any) -> Plan:
    return Plan.model_validate(
        {
            "model": model,
            "cluster": {"gpu": "h100-sxm-80gb", "gpus": 16},
            "strategy": {"tensor": {"size": tensor}, "kernels": "fused", **strategy},
            "training": {"sequence_length": 1024, "global_batch": 16, "micro_batch": 2},
        }
    ).replace(**{"strategy.operators": operators})


ULYSSES = {"size": 2, "algorithm": "ulysses"}
MIXTRAL = OF_ATTENTION | {"blocks.*.mlp": "((1,),(2,))"}
CLOSED_FORMS = {
    "ring": on_gpus("llama-3-8b", 8, megatron(8), context={"size": 2}),
    "ulysses": on_gpus("llama-3-8b", 4, megatron(4), context=ULYSSES),
    "zb-h1": on_gpus("llama-3-8b", 8, megatron(8), pipeline={"size": 2, "schedule": "zb-h1"}),
    "experts": on_gpus("mixtral-8x7b", 2, MIXTRAL, expert={"size": 4}),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_columns_before_rows_cost_what_tensor_parallelism_does(name: str) -> None:
    """Two ways to the same figures. Closed forms alone hide tensor parallelism's collectives behind
    weight gradients, so that their time is another.
    """
    plan = CLOSED_FORMS[name]
    shapes, closed = estimate(plan), estimate(plan.replace(**{"strategy.operators": {}}))
    assert peaks(shapes, 0) == pytest.approx(peaks(closed, 0), rel=1e-3)
    assert calls(shapes, 0, 0) == calls(closed, 0, 0)
    for part, seconds in closed.notes["time"].items():
        if part != "tensor_comm":
            assert math.isclose(shapes.notes["time"][part], seconds, rel_tol=1e-3), part


def drawn(
    rng: random.Random,
    mesh: tuple[int, int, int],
    layers: int,
    strategy: dict[str, Any],
    training: dict[str, Any] | None = None,
    shape: dict[str, Any] | None = None,
    gpus: dict[str, Any] | None = None,
) -> Plan:
    """A plan on tensor x pipeline x data ranks, with drawn strategies of its operators."""
    (ranks, stages, data), batch = mesh, rng.choice([1, 2])
    context = strategy.get("context", {}).get("size", 1)
    while True:
        written = Plan.model_validate(
            {
                "model": drawn_shape(rng, ranks) | {"layers": layers} | (shape or {}),
                "cluster": {"gpu": "local", "gpus": ranks * stages * data * context},
                "strategy": {"tensor": {"size": ranks}, **strategy},
                "training": {
                    "sequence_length": 64,
                    "micro_batch": batch,
                    "global_batch": batch * data * stages * rng.choice([2, 3]),
                    **(training or {}),
                },
                **(gpus or {}),
            }
        )
        if plan := with_drawn_operators(rng, written):
            return plan


def drawn_pipeline(seed: int, schedule: str) -> Plan:
    """A plan with a pipeline, its layers alike in a row or not."""
    rng, chunks = random.Random(f"{schedule} {seed}"), CHUNKS[schedule]
    mesh = rng.choice([(2, 2, 2), (4, 2, 1), (2, 3, 1)])
    strategy = {
        "data": {"zero": rng.choice([0, 0, 1])},
        "recompute": rng.choice(RECOMPUTE),
        "pipeline": {"size": mesh[1], "schedule": schedule, "chunks": chunks},
        "precision": rng.choice(["fp32", "bf16"]),
    }
    layers = max(3, mesh[1] * chunks + rng.choice([0, 1, 2, 9]))
    return drawn(rng, mesh, layers, strategy)


@pytest.mark.slow
@pytest.mark.drawn(6)
@pytest.mark.parametrize("schedule", CHUNKS)
@pytest.mark.parametrize("seed", range(8))
def test_an_estimate_of_a_drawn_pipeline_is_what_every_rank_does(seed: int, schedule: str) -> None:
    agrees(drawn_pipeline(seed, schedule))


def drawn_replicas(seed: int, distribution: str) -> Plan:
    """A plan whose stages have replicas of their own."""
    rng = random.Random(f"{distribution} {seed}")
    replicas = rng.choice([[1, 3], [3, 1], [1, 2]])
    strategy = {
        "pipeline": {"size": 2, "replicas": replicas, "distribution": distribution},
        "data": {"zero": rng.choice([0, 1])},
        "recompute": rng.choice(RECOMPUTE),
    }
    batch = {"micro_batch": 6, "global_batch": 18, "sequence_length": 32}
    gpus = {"cluster": {"gpu": "local", "gpus": 2 * sum(replicas)}}
    return drawn(rng, (2, 2, 1), 4, strategy, batch, gpus=gpus)


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize("distribution", ["split", "round_robin"])
@pytest.mark.parametrize("seed", range(6))
def test_an_estimate_with_replicas_of_stages_is_what_every_rank_does(
    seed: int, distribution: str
) -> None:
    agrees(drawn_replicas(seed, distribution))


def drawn_experts(seed: int) -> Plan:
    """A plan of a model with experts."""
    rng = random.Random(f"experts {seed}")
    expert = rng.choice([1, 2])
    mesh = (2, 1, 2) if expert > 1 else rng.choice([(2, 1, 1), (4, 1, 1), (2, 2, 1)])
    schedule = rng.choice(["1f1b", "zb-h1"]) if mesh[1] > 1 else "1f1b"
    moe: dict[str, Any] = {
        **{"experts": rng.choice([4, 8]), "top_k": rng.choice([1, 2]), "ffn": 128},
        **{"shared": rng.choice([0, 0, 1]), "first_dense": rng.choice([0, 1])},
        **{"capacity": rng.choice([None, None, 1.5]), "auxiliary_loss": rng.choice([0, 0.01])},
    }
    strategy = {
        "expert": {"size": expert},
        "pipeline": {"size": mesh[1], "schedule": schedule},
        "data": {"zero": rng.choice([0, 1])},
        "recompute": rng.choice(["none", "none", "full", "selective", ["blocks.*.mlp"], [0, 2]]),
        "precision": rng.choice(["fp32", "bf16"]),
    }
    dropout = {"dropout": rng.choice([0.0, 0.0, 0.1])}
    return drawn(rng, mesh, rng.choice([3, 6]), strategy, dropout, {"moe": moe})


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize("seed", range(24))
def test_an_estimate_with_experts_is_what_every_rank_does(seed: int) -> None:
    agrees(drawn_experts(seed))


def drawn_attention(seed: int) -> Plan:
    """A plan whose attention keeps its scores, or repeats key-value heads."""
    rng = random.Random(f"attention {seed}")
    attention = rng.choice(["math", "efficient"])
    strategy = {"recompute": rng.choice(RECOMPUTE), "precision": rng.choice(["fp32", "bf16"])}
    on_gpu = attention == "efficient" or rng.random() < 0.3  # which a CPU has another name for
    gpus = {"cluster": {"gpu": "h100-sxm-80gb" if on_gpu else "local", "gpus": 2}}
    return drawn(rng, (2, 1, 1), 3, strategy | {"attention": attention}, gpus=gpus)


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize("seed", range(12))
def test_an_estimate_of_other_attention_is_what_every_rank_does(seed: int) -> None:
    agrees(drawn_attention(seed))


def drawn_float8(seed: int) -> Plan:
    """A plan whose blocks' GEMMs are fp8."""
    rng = random.Random(f"fp8 {seed}")
    mesh = rng.choice([(2, 1, 1), (4, 1, 1), (2, 2, 1)])
    context = rng.choice([1, 1, 2]) if mesh[0] * mesh[1] == 2 else 1
    recompute = rng.choice(["none", "none", "full", "selective", ["blocks.*.mlp"], [0, 2]])
    strategy = {
        **{"precision": "fp8", "recompute": recompute, "context": {"size": context}},
        "pipeline": {"size": mesh[1]},
    }
    shape = {"hidden": 256, "ffn": 512, "vocab": 512, "max_positions": 128}
    ranks = mesh[0] * mesh[1] * context
    gpus = {"cluster": {"gpu": "h100-sxm-80gb", "gpus": ranks}}
    training = {"sequence_length": 128}
    while True:
        plan = drawn(rng, mesh, rng.choice([3, 5]), strategy, training, shape, gpus)
        if not float8_rules.problems(plan.resolve()):
            return plan


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize("seed", range(12))
def test_an_estimate_in_fp8_is_what_every_rank_does(seed: int) -> None:
    agrees(drawn_float8(seed))


def drawn_context(seed: int, algorithm: str) -> Plan:
    """A plan with context ranks."""
    rng = random.Random(f"{algorithm} {seed}")
    mesh = rng.choice([(2, 1, 1), (2, 1, 1), (2, 2, 1)])
    context: dict[str, Any] = {"size": 2 if mesh[1] == 2 else rng.choice([2, 4])}
    if algorithm == "usp":
        mesh, context = (2, 1, 1), {"size": 4, "ulysses_size": 2}
    strategy = {
        "context": {"algorithm": algorithm, **context},
        "recompute": rng.choice(RECOMPUTE),
        "pipeline": {"size": mesh[1]},
        "precision": rng.choice(["fp32", "bf16"]),
    }
    return drawn(rng, mesh, 3, strategy, {"dropout": rng.choice([0.0, 0.1])}, {"heads": 16})


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize("algorithm", ["ring", "ulysses", "usp"])
@pytest.mark.parametrize("seed", range(8))
def test_an_estimate_with_context_ranks_is_what_every_rank_does(seed: int, algorithm: str) -> None:
    agrees(drawn_context(seed, algorithm))


def drawn_dropout(seed: int) -> Plan:
    """A plan with dropout, of shards by rows and by width."""
    rng = random.Random(f"dropout {seed}")
    mesh = rng.choice([(2, 1, 1), (4, 1, 1), (2, 2, 1)])
    strategy = {"recompute": rng.choice(RECOMPUTE), "pipeline": {"size": mesh[1]}}
    if rng.random() < 0.5:
        strategy |= {"precision": "bf16", "kernels": rng.choice(["eager", "fused"])}
    return drawn(rng, mesh, rng.choice([3, 5]), strategy, {"dropout": 0.1})


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize("seed", range(20))
def test_an_estimate_with_dropout_is_what_every_rank_does(seed: int) -> None:
    agrees(drawn_dropout(seed))
