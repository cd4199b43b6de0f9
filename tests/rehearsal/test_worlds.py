"""Chosen ranks of large worlds rehearse; the child process, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import PlanError
from workbench.machine import gpu_catalog
from workbench.plan.catalog import catalog
from workbench.plan.model.parameter_count import parameters
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.legal_sizes import token_parts
from workbench.plan.rules.supported import runnable
from workbench.plan.schedule_table import executed, pair_groups
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.profile import Profile
from workbench.rehearsal.order_check import check_order
from workbench.rehearsal.rehearse import rehearse

RUNNABLE = [name for name in catalog.strategies() if runnable(name) and name != "single"]
MIDDLE = {
    "layers": 8,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 128256,
    "name": "a quarter of 8B",
}
OF_EXPERTS = ("expert-parallel", "deepseek-v3")
BOUNDED: dict[str, dict[str, object]] = {
    "colossal-2d": {"strategy.tensor.size": [4, 4]},
    "colossal-2.5d": {"strategy.tensor.size": [4, 4, 2]},
    "ring-attention": {"strategy.context.size": 8},
    "usp": {"strategy.context.size": 16},
}
"""What takes as many turns as it has ranks on a side."""


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """The first fake tensor of a process imports half of torch."""
    rehearse(
        Plan.of("tiny", gpu="local", gpus=1, strategy="single", set={"training.sequence_length": 8})
    )


def large(strategy: str, gpus: int, **changes: Any) -> ResolvedPlan:
    """One micro-batch a pipeline stage; two at least. A grid gets a sequence for each part that it
    splits them into.
    """
    shape = dict(MIDDLE)
    plan = Plan.model_validate(
        {
            "model": shape
            | ({"moe": {"experts": 8, "top_k": 2, "ffn": 1792}} if strategy in OF_EXPERTS else {}),
            "cluster": {"gpu": "h100-sxm-80gb", "gpus": gpus},
            "strategy": {"preset": strategy, "precision": "bf16"},
            "training": {"sequence_length": 512, "global_batch": 8192 * gpus, "micro_batch": 64},
        }
    ).replace(**changes)
    found = plan.resolve()
    tensor = found.strategy.tensor
    micro = token_parts(tensor.algorithm, tensor.size)
    microbatches = max(
        2, found.sizes["pipeline"] * (2 if found.strategy.pipeline.schedule == "dualpipe-v" else 1)
    )
    batch = {
        "training.micro_batch": micro,
        "training.global_batch": microbatches * micro * found.sizes["data"],
    }
    return plan.replace(**batch).resolve()


def last_stage(plan: ResolvedPlan) -> int:
    """Parameters on a rank of the last pipeline rank, which is split over the tensor axis but for
    the norms.
    """
    shape, size = plan.shape, plan.sizes["tensor"]
    table, partition = executed(plan)
    own = table.stages_of(table.ranks - 1)
    whole = parameters(shape)
    head = table.stages - 1 in own
    tables = (whole.head * head + (whole.embedding if 0 in own else 0)) // size
    matrices = (whole.attention + whole.mlp) // shape.layers // size
    layers = sum(partition[stage] for stage in own)
    return layers * (matrices + 2 * shape.hidden) + shape.hidden * head + tables


def one_gpu_each() -> list[str]:
    """A GPU of the catalog for every kind of device."""
    return list({entry.gpu.device: name for name, entry in gpu_catalog.gpus().items()}.values())


@pytest.mark.parametrize("gpu", one_gpu_each())
def test_a_gpu_of_every_kind_is_rehearsed(gpu: str) -> None:
    plan = Plan.of("tiny", gpu=gpu, gpus=2, strategy="ddp")
    assert rehearse(plan, [1]).peak_bytes_by_rank[1] > 0
    assert check_order(plan).problems == ()


@pytest.mark.slow
@pytest.mark.drawn(20)
@pytest.mark.parametrize("gpus", [8, 2048])
@pytest.mark.parametrize("strategy", RUNNABLE)
def test_every_runnable_preset_rehearses_at_any_size(strategy: str, gpus: int) -> None:
    plan = large(strategy, gpus, **(BOUNDED.get(strategy, {}) if gpus > 64 else {}))
    rank = gpus - gpus // plan.sizes["pipeline"]  # whose shards end with no padding
    profile = rehearse(plan, [rank])
    rows = profile.memory[profile.memory.moment == "peak"]
    assert set(rows["rank"]) == {rank} and profile.world_size == gpus
    held = {
        c: int(rows[rows.category == c].bytes.max()) for c in ("parameters", "gradients", "master")
    }
    plain = (
        plan.strategy.data.zero == 0
        and plan.strategy.tensor.algorithm == "1d"
        and not plan.shape.moe
    )
    if plain:
        assert held["parameters"] == 2 * last_stage(plan)
        assert (
            held["gradients"] == held["master"]
            if plan.strategy.gradient_dtype == "fp32"
            else held["parameters"]
        )
        assert held["master"] == 2 * held["parameters"]
    assert held == pytest.approx(states(plan, rank), rel=0.02)
    on_card = rows[rows.tier == "device"]
    assert profile.peak_bytes_by_rank[rank] == on_card.groupby("step").bytes.sum().max()
    assert len(profile.peak_bytes_by_rank) == gpus / plan.sizes["pipeline"]
    assert profile.fits is (None if plan.sizes["pipeline"] > 1 else True)
    groups = profile.collectives.groupby("axis").group_size.max()
    tensor, replicas = plan.strategy.tensor, plan.sizes["data"] * plan.sizes["context"]
    sizes = plan.sizes | {
        "tensor": max(tensor.size) if isinstance(tensor.size, list) else plan.sizes["tensor"]
    }
    shard = plan.strategy.data.shard
    ulysses = plan.strategy.context.num_ulysses_ranks
    sizes["context"] = max(ulysses, sizes["context"] // ulysses)
    sizes["data"] = replicas if shard == "all" else max(shard, replicas // shard)
    if pair_groups(plan):
        sizes["pipeline"] = 2
    for axis, size in sizes.items():
        if size > 1:
            assert groups[axis] == size, axis
    assert groups["world"] == gpus


def states(plan: Plan, rank: int) -> dict[str, int]:
    """What the planner's formulas (1910.02054) say that the rank holds."""
    profile = estimate(plan)
    rows = profile.memory[(profile.memory.moment == "peak")]
    own = rows[rows["rank"] == profile.representative.get(rank, rank)]
    return {
        c: int(own[own.category == c].bytes.max()) for c in ("parameters", "gradients", "master")
    }


@pytest.mark.slow
def test_a_product_of_three_axes_on_2048_ranks() -> None:
    plan = large("megatron-3d", 2048, **{"strategy.tensor.size": 8, "strategy.pipeline.size": 8})
    profile = rehearse(plan, [0, 2047])
    assert plan.sizes == {"tensor": 8, "context": 1, "data": 32, "pipeline": 8}
    stages = profile.memory.groupby("rank").stage.first().to_dict()
    assert stages == {0: 0, 2047: 7}
    logits = profile.memory[profile.memory.category == "logits"]
    assert set(logits["rank"]) == {2047}
    data = profile.collectives[profile.collectives.axis == "data"]
    sums = (data.bytes * data["count"])[data.step == 1].groupby(data["rank"]).sum()
    weights = profile.memory[
        (profile.memory.category == "gradients") & (profile.memory.moment == "maximum")
    ]
    assert sums.to_dict() == weights.groupby("rank").bytes.max().to_dict()


def test_ranks_that_do_the_same_are_rehearsed_once() -> None:
    profile = rehearse(large("tensor-pipeline", 8))
    assert set(profile.representative) == set(range(8))
    stages = large("tensor-pipeline", 8).sizes["pipeline"]
    assert len(set(profile.representative.values())) == stages == profile.memory["rank"].nunique()
    assert set(profile.peak_bytes_by_rank) == set(range(8))


@pytest.mark.parametrize(
    "field, value", [("training.optimizer.moments", "int8"), ("strategy.stack", "torchtitan")]
)
def test_fields_that_cannot_be_rehearsed_are_named(field: str, value: str) -> None:
    plan = Plan.of("tiny", gpu="h100-sxm-80gb", gpus=2, strategy="dapple", set={field: value})
    with pytest.raises(PlanError) as caught:
        rehearse(plan)
    assert [problem.field for problem in caught.value.problems] == [field]
    assert value in str(caught.value)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"--ranks: {rank} is not one of 0 to 7"):
        rehearse(large("ddp", 8), [rank])


def child(folder: Path, plan: Plan, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = folder / "plan.yaml"
    path.write_text(plan.to_yaml())
    command = [
        sys.executable,
        "-m",
        "workbench.rehearsal",
        str(path),
        "--to",
        str(folder / "out"),
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_child_tells_its_progress_and_writes_a_profile(tmp_path: Path) -> None:
    plan = Plan.of(
        "tiny", gpu="local", gpus=2, strategy="dapple", set={"training.sequence_length": 32}
    )
    done = child(tmp_path, plan)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert said == [{"done": n, "of": len(said)} for n in range(1, len(said) + 1)]
    profile = Profile.read(tmp_path / "out")
    here = rehearse(plan)
    assert profile.source == "rehearsed" and profile.peak_bytes_by_rank == here.peak_bytes_by_rank
    assert profile.representative == here.representative


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, arguments, words",
    [
        ("dapple", ["--ranks", "2"], "--ranks: 2 is not one of 0 to 1"),
        ("dapple", ["--ranks", "one"], "--ranks"),
        ("dapple", ["--ranks", "0,7"], "--ranks: 7 is not one of 0 to 1"),
    ],
)
def test_the_child_refuses_in_words(
    tmp_path: Path, strategy: str, arguments: list[str], words: str
) -> None:
    done = child(
        tmp_path, Plan.of("tiny", gpu="h100-sxm-80gb", gpus=2, strategy=strategy), *arguments
    )
    assert done.returncode == 2
    assert words in done.stderr and "Traceback" not in done.stderr and not done.stdout
    assert not (tmp_path / "out").exists()
