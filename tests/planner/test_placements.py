"""Orders of the axes over nodes and racks, and shards within and across racks."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.errors import PlanError
from workbench.machine import gpu_catalog
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.planner.explain import explain
from workbench.planner.explain.placements import placement_table, shard_within_rack
from workbench.planner.explain.plan_figures import explained_plan

SIZES = {"training.sequence_length": 1024, "training.global_batch": 2048}


def pangu(**sets: Any) -> Plan:
    return Plan.of("pangu-200b", gpu="ascend-910", gpus=2048, strategy="pangu-5d", set=SIZES | sets)


def test_every_row_is_the_estimate_of_its_own_changes() -> None:
    plan = pangu(**{"cluster.fabric.rack_gbs": 25.0})
    found = placement_table(explained_plan(plan)).data
    assert [row["step_seconds"] for row in found] == sorted(row["step_seconds"] for row in found)
    assert {tuple(row["placement"]) for row in found} == {
        tuple(row["placement"]) for row in found if row["shard"] == "all"
    }
    for row in (found[0], found[-1]):
        again = estimate(plan.replace(**row["changes"]))
        assert again.step_seconds == pytest.approx(row["step_seconds"], rel=1e-12)
        assert max(again.peak_bytes_by_rank.values()) == row["peak_bytes"]


def test_narrow_racks_put_pangus_shards_across_them() -> None:
    best, *_, worst = placement_table(
        explained_plan(pangu(**{"cluster.fabric.rack_gbs": 25.0}))
    ).data
    order = [axis for axis in best["placement"] if axis != "context"]
    assert order == ["tensor", "pipeline", "data"] and best["shard"] == "all"
    assert worst["placement"][-1] == "tensor" and worst["times_the_best"] > 3
    reach = {axis["axis"]: axis["reach"] for axis in best["axes"]}
    assert reach["tensor"] == "node" and reach["data"] == "racks"


def test_shards_within_a_rack_hold_more() -> None:
    found = placement_table(explained_plan(pangu())).data
    within = [row for row in found if row["shard"] != "all"]
    assert {row["shard"] for row in within} == {4, 8}  # 64 GPUs a rack, 8 or 16 apart
    across = {tuple(row["placement"]): row for row in found if row["shard"] == "all"}
    for row in within:
        assert row["peak_bytes"] > across[tuple(row["placement"])]["peak_bytes"]


def test_without_racks_or_shards_there_is_one_row_an_order() -> None:
    for changes in ({"cluster.fabric.rack_nodes": None}, {"strategy.data.zero": 0}):
        found = placement_table(explained_plan(pangu(**changes)))
        assert len(found.data) == 6 and {row["shard"] for row in found.data} == {"all"}


def test_a_group_that_a_racks_end_would_cut_is_none() -> None:
    full = pangu(**{"cluster.fabric.rack_nodes": 16}).resolve()
    assert shard_within_rack(full, ("tensor", "pipeline", "context", "data")) is None
    assert shard_within_rack(full, ("pipeline", "data", "tensor", "context")) == 8
    fabric = full.fabric.model_copy(update={"rack_nodes": 12})
    cut = full.model_copy(update={"cluster": full.cluster.model_copy(update={"fabric": fabric})})
    assert shard_within_rack(cut, ("pipeline", "data", "tensor", "context")) == 2


def test_a_plans_own_groups_are_named() -> None:
    found = placement_table(explained_plan(pangu(**{"strategy.data.shard": 4})))
    assert {row["shard"] for row in found.data} == {4}
    assert {row[1] for row in found.rows} == {"over 4"}


def test_the_network_is_said_level_by_level() -> None:
    text = repr(explain(pangu(**{"cluster.fabric.rack_gbs": 25.0}), placements=True))
    assert "32 racks of 8 nodes (25 GB/s a node out of a rack)" in text
    assert "256 nodes of 8 GPUs (100 GB/s out of a node)" in text
    flat = repr(explain(pangu(**{"cluster.fabric.rack_nodes": None}), placements=True))
    assert "racks" not in flat


@pytest.mark.parametrize("size", [3, 24, 255])
def test_a_rack_that_does_not_divide_the_nodes_is_refused(size: int) -> None:
    with pytest.raises(PlanError) as caught:
        pangu(**{"cluster.fabric.rack_nodes": size}).resolve()
    (problem,) = caught.value.problems
    assert problem.field == "cluster.fabric.rack_nodes"
    assert f"is {size}, which does not divide 256 nodes" in str(caught.value)


@pytest.mark.parametrize("size", [1, 16, 256, 1000])
def test_racks_that_are_full_and_one_that_holds_all_are_legal(size: int) -> None:
    assert pangu(**{"cluster.fabric.rack_nodes": size}).resolve().fabric.rack_nodes == size


def test_a_job_may_take_part_of_a_sites_racks() -> None:
    assert gpu_catalog.clusters()["atlas-900"].rack_nodes == 8
    part = Plan.of("tiny", gpu="ascend-910", gpus=96, strategy="ddp")
    assert part.resolve().cluster.nodes == 12
