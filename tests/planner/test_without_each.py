"""A plan without each of its dimensions: which ones it has, what each saves, and by rehearsal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from workbench.errors import ChildError
from workbench.plan.schema import Plan, build_plan
from workbench.planner import estimate
from workbench.planner.explain import explain
from workbench.planner.explain.plan_figures import explained_plan
from workbench.planner.explain.without_each import without_each
from workbench.profile import Profile
from workbench.rehearsal.rehearse import rehearse

SIZES = {"training.sequence_length": 1024, "training.global_batch": 2048}
PANGU = Plan.of("pangu-200b", gpu="ascend-910", gpus=2048, strategy="pangu-5d", set=SIZES)
SMALL = {"training.sequence_length": 64, "training.global_batch": 8, "strategy.recompute": "full"}


def rows(plan: Plan) -> dict[str, dict[str, Any]]:
    found = without_each(explained_plan(plan)).data
    return {(row["without"] or "").split(" (")[0]: row for row in found}


def test_pangu_has_five_dimensions_and_each_saves_memory() -> None:
    found = rows(PANGU)
    own = found.pop("")
    assert set(found) == {"tensor", "pipeline", "data", "sharding", "recomputation"}
    assert own["fits"] and own["times_the_plan"] == 1.0
    for row in found.values():
        assert row["peak_bytes"] > 1.5 * own["peak_bytes"]
    states = {name: row["by_category"] for name, row in found.items()}
    held = own["by_category"]
    assert states["tensor"]["parameters"] > 7.5 * held["parameters"]
    assert states["pipeline"]["parameters"] > 14 * held["parameters"]
    assert states["sharding"]["master"] == pytest.approx(16 * held["master"], rel=1e-3)
    assert states["recomputation"]["parameters"] == held["parameters"]


def test_a_row_is_the_estimate_of_its_own_changes() -> None:
    for row in without_each(explained_plan(PANGU)).data:
        again = estimate(PANGU.replace(**row["changes"]))
        assert row["peak_bytes"] == max(again.peak_bytes_by_rank.values())
        assert row["step_seconds"] == again.step_seconds and row["gpus"] == again.world_size


def test_one_replica_keeps_its_own_gpus_and_batch() -> None:
    (data,) = (row for name, row in rows(PANGU).items() if name == "data")
    assert data["gpus"] == 128 and data["changes"]["training.global_batch"] == 128
    assert data["note"] == "global batch 128"


def test_a_batch_too_small_for_more_replicas_grows_and_the_row_says_so() -> None:
    sets = {"strategy.tensor.size": 4, "strategy.pipeline.size": 1, "training.global_batch": 2}
    plan = Plan.of("gpt3-13b", gpu="h100-sxm-80gb", gpus=8, strategy="megatron-3d", set=sets)
    assert rows(plan)["tensor"]["note"] == "global batch 8"


def test_experts_go_with_their_replicas_and_offload_with_its_shards() -> None:
    experts = Plan.of("mixtral-8x7b", gpu="h100-sxm-80gb", gpus=16, strategy="expert-parallel")
    assert rows(experts)["data"]["changes"]["strategy.expert.size"] == 1
    offloaded = Plan.of("gpt3-13b", gpu="v100-sxm2-32gb", gpus=4, strategy="zero-offload")
    found = rows(offloaded)
    assert found["sharding"]["changes"]["strategy.data.offload"] == "none"
    assert {"offload of optimizer", "sharding", "data"} <= set(found)


def test_groups_that_shard_go_with_the_replicas_they_are_of() -> None:
    hybrid = {"strategy.data.shard": 2}
    plan = Plan.of("gpt3-13b", gpu="h100-sxm-80gb", gpus=8, strategy="zero-3", set=hybrid)
    found = rows(plan)
    assert all(found[name]["peak_bytes"] for name in ("data", "sharding"))


def test_what_is_illegal_says_why() -> None:
    strategy = {"tensor": {"size": 2}, "operators": {"blocks.*.mlp.down": "((1,2),(2,1))"}}
    plan = build_plan(
        {
            "model": "tiny",
            "cluster": {"gpu": "h100-sxm-80gb", "gpus": 2},
            "strategy": strategy,
            "training": {"sequence_length": 64, "global_batch": 2, "micro_batch": 1},
        }
    )
    tensor = rows(plan)["tensor"]
    assert tensor["peak_bytes"] is None and "strategy.operators" in tensor["note"]


def test_rehearsals_are_of_the_rank_with_the_most_and_near_the_estimate() -> None:
    sets = {**SMALL, "strategy.pipeline.size": 2, "strategy.tensor.size": 1}
    plan = Plan.of("tiny", gpu="local", gpus=4, strategy="megatron-3d", set=sets)
    asked: list[list[int]] = []

    def rehearsed(plan: Plan, ranks: list[int]) -> Profile:
        asked.append(ranks)
        return rehearse(plan, ranks)

    found = without_each(explained_plan(plan), rehearsed)
    for row, ranks in zip(found.data, asked, strict=True):
        peaks = estimate(plan.replace(**row["changes"])).peak_bytes_by_rank
        assert peaks[ranks[0]] == max(peaks.values()) and len(ranks) == 1
        assert row["allocated_bytes"] == pytest.approx(row["rehearsed_allocated_bytes"], rel=0.02)


def test_a_rehearsal_that_takes_too_long_is_a_note() -> None:
    def late(plan: Plan, ranks: list[int]) -> Profile:
        raise ChildError("not done in 60 s")

    found = without_each(explained_plan(PANGU), late)
    assert all(row["rehearsed_allocated_bytes"] is None for row in found.data)
    assert "without data (16): global batch 128; not done in 60 s" in found.notes


def test_the_table_is_part_of_an_explanation_where_it_is_asked_for() -> None:
    found = explain(PANGU, without=True)
    data = json.loads(json.dumps(found.to_json()))
    assert len(data["without_each"]) == 6 and "without_each" not in explain(PANGU).to_json()
    assert "Without each dimension" in repr(found) and "sharding (ZeRO-1)" in found._repr_html_()
