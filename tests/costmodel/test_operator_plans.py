"""Estimates of plans with operator strategies are what rehearsal, which runs the real code, does:
every collective of a step, and the peak memory of every rank.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from tests.parallel.operator_strategies import drawn_form, sequence_parallel
from tests.parallel.small import GPT, LLAMA
from tests.parallel.small import plan as small_plan
from tests.parallel.test_operators import GRID, MIXED, ROWS, megatron
from workbench.errors import PlanError
from workbench.plan.rules.strategy.operator_rules import problems, sites
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.profile import Profile
from workbench.rehearsal.rehearse import rehearse

CALL = ["axis", "kind", "group_size", "dtype", "bytes", "action"]
LIVE = (
    *("parameters", "gradients", "optimizer", "master", "activations", "logits"),
    *("gathered", "communication", "temporary"),
)
"""Categories of tensors; the others are an allocator's and a driver's."""
WIDE = {"hidden": 128, "ffn": 256, "vocab": 512, "layers": 3}
"""Wide enough for what aligns tensors in buckets not to count."""


def calls(profile: Profile, step: int, rank: int) -> dict[Any, int]:
    frame = profile.collectives
    kept = frame[(frame.step == step) & (frame["rank"] == rank)]
    found: dict[Any, int] = kept.groupby(CALL)["count"].sum().to_dict()
    return found


def peaks(profile: Profile, step: int) -> dict[int, int]:
    m = profile.memory
    kept = m[(m.step == step) & (m.tier == "device") & (m.moment == "peak") & m.category.isin(LIVE)]
    return {int(rank): int(own["bytes"].sum()) for rank, own in kept.groupby("rank")}


def agrees(plan: Plan) -> None:
    estimated, rehearsed = estimate(plan), rehearse(plan)
    for rank in set(estimated.representative.values()):
        assert calls(estimated, 0, rank) == calls(rehearsed, 1, rank), rank
    assert peaks(estimated, 0) == pytest.approx(peaks(rehearsed, 1), rel=0.01)


def on(*mesh: int, operators: dict[str, str], shape: dict[str, Any], **changes: Any) -> Plan:
    own = {"strategy.operators": operators, "strategy.data.bucket_mib": 25}
    own |= {"training.sequence_length": 64, **changes}
    return small_plan(*mesh, shape={**shape, **WIDE}, changes=own, microbatches=2)


def by_tokens(*mesh: int, shape: dict[str, Any], **changes: Any) -> Plan:
    """Sequence parallelism."""
    plan = on(*mesh, operators={}, shape=shape, **changes)
    operators = sequence_parallel(plan.resolve().shape, mesh[0])
    return plan.replace(**{"strategy.operators": operators})


CASES = {
    "pairs": on(2, operators=megatron(2, GPT), shape=GPT),
    "rows": on(2, 1, 2, operators=ROWS, shape=GPT, **{"strategy.data.zero": 1}),
    "zero-3": on(2, 1, 2, operators=megatron(2), shape=LLAMA, **{"strategy.data.zero": 3}),
    "pipeline": on(2, 2, operators=megatron(2), shape=LLAMA),
    "recompute": on(2, operators=ROWS, shape=GPT, **{"strategy.recompute": "full"}),
    "recompute by operator": on(
        2,
        operators=megatron(2),
        shape=LLAMA,
        **{"strategy.recompute": ["blocks.*.mlp", "blocks.*.attention.attend"]},
    ),
    "two by two": on(4, operators=GRID, shape=GPT),
    "tokens": by_tokens(2, shape=GPT),
    "positions": on(4, operators={"embedding.tokens": "((1,2),(2,1))"}, shape=GPT),
    "tokens, recompute": by_tokens(2, shape=LLAMA, **{"strategy.recompute": "full"}),
    "tokens, zero-3": by_tokens(2, 1, 2, shape=LLAMA, **{"strategy.data.zero": 3}),
    "tokens, pipeline": by_tokens(2, 2, shape=LLAMA),
}


QUICK = {"pairs", "zero-3", "two by two", "recompute by operator", "tokens, pipeline"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CASES]
)
def test_an_estimate_is_what_every_rank_does(name: str) -> None:
    agrees(CASES[name])


@pytest.mark.parametrize("kernels", ["eager", "compiled", "fused"])
def test_an_estimate_on_a_gpu_counts_the_plans_kernels(kernels: str) -> None:
    gpu = {
        "cluster": {"gpu": "h100-sxm-80gb", "gpus": 2},
        "strategy.precision": "bf16",
        "strategy.kernels": kernels,
    }
    agrees(on(2, operators=ROWS, shape=LLAMA, **gpu))


def drawn_shape(rng: random.Random, ranks: int) -> dict[str, Any]:
    heads, learned = max(ranks, rng.choice([4, 8])), rng.random() < 0.5
    return {
        **{"layers": rng.choice([2, 3, 5]), "hidden": 128, "ffn": 256, "heads": heads},
        **{"kv_heads": rng.choice([heads, heads // 2]), "vocab": rng.choice([512, 1000])},
        **{"norm": rng.choice(["rmsnorm", "layernorm"]), "tied": rng.random() < 0.3},
        **{"mlp": rng.choice(["swiglu", "geglu", "gelu", "relu"])},
        **{"biases": rng.choice(["none", "qkv", "all"])},
        **({"positions": "learned", "max_positions": 64} if learned else {}),
    }


def drawn(seed: int) -> Plan:
    """A legal plan: other strategies are drawn until they fit one another."""
    rng = random.Random(seed)
    ranks, batch = rng.choice([2, 2, 4, 8]), rng.choice([1, 2, 4])
    stages = rng.choice([1, 1, 2]) if ranks < 8 else 1
    data = 2 if ranks * stages <= 4 else 1
    recompute: list[Any] = ["none", "none", "full", "selective", ["blocks.*.mlp"], [0]]
    strategy = {
        **{"tensor": {"size": ranks}, "data": {"zero": rng.choice([0, 1, 2, 3])}},
        **{"recompute": rng.choice(recompute)},
        "pipeline": {"size": stages, "schedule": rng.choice(["1f1b", "gpipe"])},
    }
    while True:
        written = Plan.model_validate(
            {
                "model": drawn_shape(rng, ranks),
                "cluster": {"gpu": "local", "gpus": ranks * stages * data},
                "strategy": strategy,
                "training": {
                    "sequence_length": 64,
                    "micro_batch": batch,
                    "global_batch": batch * data * rng.choice([2, 4]),
                },
            }
        )
        if plan := with_drawn_operators(rng, written):
            return plan


def with_drawn_operators(rng: random.Random, written: Plan) -> Plan | None:
    """The plan with strategies for some of its modules; None where they do not fit one another."""
    ranks, batch = written.strategy.tensor.ranks, written.training.micro_batch
    full = written.resolve()
    tokens = full.training.sequence_length // full.strategy.context.size
    table = sites(full.shape, batch, ranks, tokens)
    layer = rng.random() < 0.3  # the first in its own way
    forms = {
        name.replace(".0.", ".0." if layer and ".0." in name else ".*."): site
        for name, site in table.items()
        if ".0." in name or not name.startswith("blocks.") or (layer and ".1." in name)
    }
    forms = {name: site for name, site in forms.items() if not (layer and ".1." in name)}
    operators = {
        name: drawn_form(rng, site, ranks) for name, site in forms.items() if rng.random() < 0.6
    }
    plan = written.replace(**{"strategy.operators": operators})
    return plan if operators and not problems(plan.resolve()) else None


@pytest.mark.slow
@pytest.mark.drawn(6)
@pytest.mark.parametrize("seed", range(60))
def test_an_estimate_of_a_drawn_plan_is_what_every_rank_does(seed: int) -> None:
    agrees(drawn(seed))


@pytest.mark.parametrize("kernels", ["eager", "fused"])
def test_columns_before_rows_cost_what_tensor_parallelism_does(kernels: str) -> None:
    """Two ways to the same figures: on shapes, and in closed form. Only the few bytes of masks and
    statistics are counted otherwise, and the scalar that the loss is.
    """
    plan = Plan.model_validate(
        {
            "model": "llama-3-8b",
            "cluster": {"gpu": "h100-sxm-80gb", "gpus": 8},
            "strategy": {"tensor": {"size": 8}, "kernels": kernels},
            "training": {"sequence_length": 1024, "global_batch": 16, "micro_batch": 2},
        }
    )
    closed = estimate(plan)
    shapes = estimate(plan.replace(**{"strategy.operators": megatron(8)}))
    assert peaks(shapes, 0) == pytest.approx(peaks(closed, 0), rel=1e-3)
    assert calls(shapes, 0, 0) == calls(closed, 0, 0)
    for name, seconds in closed.notes["time"].items():
        assert math.isclose(shapes.notes["time"][name], seconds, rel_tol=1e-3), name


@pytest.mark.parametrize("kernels", ["eager", "fused"])
@pytest.mark.parametrize(("pipeline", "memory"), [(1, 5e-4), (2, 2e-3)])
def test_tokens_split_cost_what_sequence_parallelism_does(
    kernels: str, pipeline: int, memory: float
) -> None:
    """Call by call, and in time. What a gather or a logits' buffer needs for a moment is counted
    otherwise: at the peak by no more than 0.2 %.
    """
    plan = Plan.model_validate(
        {
            "model": "llama-3-8b",
            "cluster": {"gpu": "h100-sxm-80gb", "gpus": 8},
            "strategy": {
                "tensor": {"size": 8 // pipeline, "sequence": True},
                "pipeline": {"size": pipeline},
                "kernels": kernels,
            },
            "training": {"sequence_length": 4096, "global_batch": 16, "micro_batch": 1},
        }
    )
    closed, operators = estimate(plan), sequence_parallel(plan.resolve().shape, 8 // pipeline)
    fields = {"strategy.tensor.sequence": False, "strategy.operators": operators}
    shapes = estimate(plan.replace(**fields))
    assert peaks(shapes, 0) == pytest.approx(peaks(closed, 0), rel=memory)
    assert calls(shapes, 0, 0) == calls(closed, 0, 0)
    for name, seconds in closed.notes["time"].items():
        assert math.isclose(shapes.notes["time"][name], seconds, rel_tol=1e-3), name


@pytest.mark.parametrize(
    ("field", "value"), [("strategy.stack", "megatron"), ("finetune.lora", {"rank": 4})]
)
def test_what_is_not_priced_beside_operators_is_refused(field: str, value: Any) -> None:
    plan = on(2, operators=megatron(2), shape=LLAMA, **{field: value})
    with pytest.raises(PlanError, match=rf"{field}: is .*beside strategy.operators"):
        estimate(plan)


def test_a_grid_of_mixed_strategies_is_priced_group_by_group() -> None:
    """Of 2 nodes with 2 GPUs: an all-reduce over the outer axis crosses the network, one over the
    inner does not.
    """
    cluster = {"cluster": {"gpu": "h100-sxm-80gb", "gpus": 4, "gpus_per_node": 2}}
    found = estimate(on(4, operators=MIXED, shape=GPT, **cluster)).notes["time"]["tensor_comm"]
    near = {"cluster": {"gpu": "h100-sxm-80gb", "gpus": 4, "gpus_per_node": 4}}
    assert found > estimate(on(4, operators=MIXED, shape=GPT, **near)).notes["time"]["tensor_comm"]


TIED = {
    **{"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 256, "max_positions": 64},
    **{"positions": "learned", "norm": "layernorm", "mlp": "gelu", "biases": "all", "tied": True},
}
BY_TOKENS = {
    "embedding.tokens": "((2,1),(1,1),(1,2,1))",
    "blocks.*.*_norm": "((1,2,1),(1,))",
    "final_norm": "((1,2,1),(1,))",
    "head": "((1,1),(1,2))",
}


@pytest.mark.parametrize(
    ("gpus", "tensor", "operators", "embedding_norm"),
    [
        (4, {"size": 2, "sequence": True}, {}, False),
        (4, {"size": 2, "sequence": True}, {}, True),
        (4, {"size": 2}, BY_TOKENS, False),
        (8, {"size": [2, 2], "algorithm": "2d"}, {}, False),
    ],
    ids=["sequence", "norm", "operators", "2d"],
)
def test_a_tied_head_gathers_the_bucket_of_the_table_alone(
    gpus: int, tensor: dict[str, Any], operators: dict[str, str], embedding_norm: bool
) -> None:
    strategy = {"tensor": tensor, "operators": operators, "data": {"zero": 3, "bucket_mib": 0.01}}
    training = {"sequence_length": 16, "global_batch": 8, "micro_batch": 2, "steps": 3}
    written = {
        "model": {**TIED, "embedding_norm": embedding_norm},
        "cluster": {"gpu": "local", "gpus": gpus},
        "strategy": strategy,
        "training": training,
    }
    agrees(Plan.model_validate(written))
