"""Racks and the order of axes: what leaves a rack is slower, and what moves most stands
innermost.
"""

from __future__ import annotations

from typing import Any

import pytest

from workbench.costmodel.communication.collective_cost import axis_links
from workbench.costmodel.inputs.rank_workload import workload
from workbench.costmodel.rates.constants import constants
from workbench.machine import gpu_catalog
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.planner.axis_placement import rank_placements

FABRIC = {**gpu_catalog.clusters()["dgx-h100"].model_dump(), "name": "racks"}


def racked(
    nodes: int | None, gbs: float | None = 10.0, latency: float | None = 50.0, **changes: Any
) -> Plan:
    fabric = FABRIC | {"rack_nodes": nodes, "rack_gbs": gbs, "rack_latency_us": latency}
    sizes = {"strategy.tensor.size": 8, "strategy.pipeline.size": 4}
    set = sizes | {"cluster.fabric": fabric, **changes}
    return Plan.of("gpt3-13b", gpu="h100-sxm-80gb", gpus=128, strategy="megatron-3d", set=set)


def link(plan: Plan, axis: str) -> tuple[float, float]:
    full = plan.resolve()
    found = axis_links(workload(full), constants(full.gpu, full.strategy.kernels))[axis]
    return float(found.bandwidth), float(found.latency)


def test_only_an_axis_that_leaves_the_rack_is_slower() -> None:
    flat, racks = racked(None), racked(4)
    for axis in ("tensor", "data"):  # data: four nodes, one rack
        assert link(racks, axis) == link(flat, axis)
    (slow, late), (fast, early) = link(racks, "pipeline"), link(flat, "pipeline")
    assert slow == pytest.approx(fast * 10 / FABRIC["nic_gbs"])
    assert late - early == pytest.approx((50 - FABRIC["nic_latency_us"]) * 1e-6)


def test_a_rack_as_large_as_the_cluster_is_no_rack() -> None:
    assert estimate(racked(16)).step_seconds == estimate(racked(None)).step_seconds


def test_a_ring_that_crosses_a_rack_once_needs_only_its_part_of_the_uplink() -> None:
    ring = {"strategy.pipeline.size": 1, "strategy.tensor.size": 1}
    fast, _ = link(racked(None, **ring), "data")
    assert (
        link(racked(4, gbs=200.0, **ring), "data")[0] == fast
    )  # of 32 ranks one leaves, with four nodes' uplinks
    assert link(racked(4, gbs=10.0, **ring), "data")[0] == pytest.approx(
        fast * 40 / FABRIC["nic_gbs"]
    )


@pytest.mark.parametrize("name", ["frontier-mi250x", "meta-roce-h100"])
def test_known_racks_are_narrower_outside(name: str) -> None:
    fabric = gpu_catalog.clusters()[name]
    assert fabric.rack_nodes and fabric.rack_gbs and fabric.rack_gbs < fabric.nic_gbs


def test_placements_are_ranked_by_the_step_that_the_estimate_says() -> None:
    ranked = rank_placements(racked(4))
    assert [one.seconds for one in ranked] == sorted(one.seconds for one in ranked)
    assert len({one.order for one in ranked}) == 6  # three axes of several ranks
    for one in (ranked[0], ranked[-1]):
        again = estimate(racked(4, **{"strategy.placement": list(one.order)}))
        assert again.step_seconds == pytest.approx(one.seconds, rel=1e-12)


def test_what_moves_most_stands_innermost_and_the_reason_says_so() -> None:
    best, worst = rank_placements(racked(4))[0], rank_placements(racked(4))[-1]
    loudest = best.axes[0]
    assert (loudest.axis, loudest.reach) == ("tensor", "node") and best.order.index("tensor") < 2
    assert next(axis for axis in worst.axes if axis.axis == "tensor").reach != "node"
    assert (
        "tensor (8) moves" in best.reason
        and "inside nodes" in best.reason
        and "estimated" in best.reason
    )


def test_unequal_replicas_keep_the_pipeline_outermost() -> None:
    plan = racked(4, **{"strategy.pipeline.size": 2, "strategy.pipeline.replicas": [12, 4]})
    assert {one.order[-1] for one in rank_placements(plan)} == {"pipeline"}


def test_replicas_of_stages_are_placed_inside_or_outside_of_tensor_ranks() -> None:
    plan = racked(
        4,
        **{
            "strategy.pipeline.size": 2,
            "strategy.pipeline.replicas": [48, 16],
            "strategy.tensor.size": 2,
        },
    )
    inner = {next(axis for axis in one.order if axis != "context") for one in rank_placements(plan)}
    assert inner == {"tensor", "data"}
    assert {one.order[-1] for one in rank_placements(plan)} == {"pipeline"}


def test_one_rank_has_one_placement() -> None:
    (only,) = rank_placements(Plan.of("tiny", gpu="h100-sxm-80gb", gpus=1))
    assert only.reason == "one rank moves nothing"
