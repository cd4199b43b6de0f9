"""The topology of a plan's cluster beside the links of the cost model."""

from __future__ import annotations

import pytest

from workbench.costmodel.communication.collective_cost import axis_links, collective_slope
from workbench.costmodel.inputs.rank_workload import workload
from workbench.costmodel.rates.constants import plan_constants
from workbench.errors import PlanError
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner.unequal_stages.cluster_topology import cluster_topology


def plan(gpus: int, tensor: int = 1) -> ResolvedPlan:
    written = {
        "model": "llama-2-7b",
        "cluster": {"gpu": "h100-sxm-80gb", "gpus": gpus},
        "strategy": {"tensor": {"size": tensor}},
    }
    return Plan.model_validate(written).resolve()


@pytest.mark.parametrize(("gpus", "tensor"), [(8, 1), (8, 2), (32, 1), (32, 4), (32, 8)])
def test_an_all_reduce_of_all_replicas_costs_what_the_cost_model_says(
    gpus: int, tensor: int
) -> None:
    full = plan(gpus, tensor)
    constants = plan_constants(full)
    link = axis_links(workload(full), constants)["data"]
    per_byte, _ = collective_slope("all_reduce", gpus // tensor, link, constants)
    topology = cluster_topology(full, tensor)
    counts = (topology.devices,) * topology.nodes
    assert topology.all_reduce_per_byte(counts) == pytest.approx(float(per_byte))


def test_replicas_of_several_gpus_are_devices() -> None:
    alone, grouped = cluster_topology(plan(32)), cluster_topology(plan(32), 4)
    assert (alone.nodes, alone.devices) == (4, 8)
    assert (grouped.nodes, grouped.devices) == (4, 2)
    assert grouped.network_rate == pytest.approx(alone.network_rate / 4)  # of each GPU
    assert grouped.device_rate == alone.device_rate
    assert grouped.memory == alone.memory == int(plan(32).gpu.memory_gib * 2**30)


def test_a_replica_of_whole_nodes_is_a_node() -> None:
    topology = cluster_topology(plan(32), 16)
    assert (topology.nodes, topology.devices) == (2, 1)


def test_replicas_that_nodes_do_not_hold_evenly_are_refused() -> None:
    with pytest.raises(PlanError, match=r"is 3, which nodes of 8 of 24 GPUs .* legal: 1, 2, 4, 8,"):
        cluster_topology(plan(24), 3)
