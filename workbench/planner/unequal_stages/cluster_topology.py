"""The topology of a plan's cluster, with the rates that the cost model gives its links."""

from __future__ import annotations

from workbench.costmodel.communication.collective_cost import group_link
from workbench.errors import refuse
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.unequal_stages.topology import Topology
from workbench.units import GIB


def cluster_topology(plan: ResolvedPlan, devices_per_replica: int = 1) -> Topology:
    """Nodes, devices and rates (bytes/s) of the GPUs of `plan`, its calibration counted.

    A replica of several GPUs (tensor x context ranks) is one device, whose GPUs send, receive and
    reduce beside each other. Sizes and memory are then those of one of its GPUs: inside a node each
    has its own link, while the network is shared. Latencies are not counted.

    Args:
        plan: A complete plan.
        devices_per_replica: Neighboring ranks that make one replica of a stage.

    Raises:
        PlanError: Replicas do not fill the nodes.
    """
    per_node = plan.cluster.gpus_per_node
    _check(plan.world_size, per_node, devices_per_replica)
    full, constants = with_calibration(plan)
    devices = max(1, per_node // devices_per_replica)
    nodes = plan.world_size // (devices * devices_per_replica)

    def rate(replicas: int) -> float:
        link = group_link(full.gpu, full.fabric, per_node, constants, replicas, devices_per_replica)
        return float(link.bandwidth)

    return Topology(
        nodes,
        devices,
        device_rate=full.gpu.link_gbs * 1e9 * constants.link_share,
        network_rate=rate(2 * devices),
        collective_rate=rate(max(2, nodes) * devices),  # leaves a rack where there are several
        memory=int(full.gpu.memory_gib * GIB),
    )


def _check(world: int, per_node: int, replica: int) -> None:
    """Replicas share a node evenly, or nodes share a replica."""
    if world % replica or (per_node % replica and replica % per_node):
        sizes = [n for n in range(1, world + 1) if not world % n]
        legal = [n for n in sizes if not per_node % n or not n % per_node]
        raise refuse(
            "strategy.tensor.size",
            f"x strategy.context.size is {replica}, which nodes of {per_node} of {world} GPUs do "
            f"not hold evenly; legal: {', '.join(map(str, legal))}",
        )
