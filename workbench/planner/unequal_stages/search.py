"""The best cut, replication and placement of a layer profile's stages (DAPPLE, 2007.01045, section
4): dynamic programming over layers planned and devices used, node by node.

The latency has no optimal substructure: a prefix with a longer way down may have the shorter steady
phase. So several prefixes are kept for each state, none that cannot come near the best plan known;
complete plans are then evaluated in closed form, and the best of those in the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workbench.errors import refuse
from workbench.plan.model.layer_profile import LayerProfile
from workbench.plan.stage_partition import dealt
from workbench.planner.unequal_stages.plan import UnequalPlan, evaluate
from workbench.planner.unequal_stages.prefixes import complete_plans
from workbench.planner.unequal_stages.stage_times import Batch, Stage
from workbench.planner.unequal_stages.topology import POLICIES, Topology
from workbench.planner.unequal_stages.transitions import placed

SIMULATED = 10
"""Plans that the simulator ranks."""
NEAR = 1.02
"""Prefixes are dropped that cannot come within this factor of the best plan known."""


@dataclass(frozen=True)
class Effort:
    """How much the search keeps."""

    prefixes: int = 4
    """Of each layer and occupancy."""
    layers: tuple[int, ...] = (16, 64)
    """Prefixes of each layer, all occupancies together, in one pass after another: what a quick one
    finds tells the next which prefixes it need not keep.
    """
    plans: int = 100
    """Complete plans of a pass that are evaluated exactly."""


def search_stages(
    profile: LayerProfile, topology: Topology, batch: Batch, effort: Effort | None = None
) -> list[UnequalPlan]:
    """The best plans that use every device, by the simulator's step time.

    Raises `PlanError` where no plan fits memory.
    """
    effort = effort or Effort()
    plans = _evaluated(profile, _simple(profile, topology), topology, batch)
    for layer in effort.layers:
        limit = min((plan.seconds for plan in plans), default=float("inf")) * NEAR
        found = complete_plans(profile, topology, batch, effort.prefixes, layer, limit)
        plans += _evaluated(profile, found[: effort.plans], topology, batch)
    if not plans:
        raise refuse(
            "strategy.pipeline.replicas",
            f"no stages on {topology.world_size} devices fit {topology.memory:g} bytes of memory "
            f"with microbatches of {batch.sequences} sequences",
        )
    return ranked(plans)


def ranked(plans: Sequence[UnequalPlan]) -> list[UnequalPlan]:
    """The best in closed form, each once, by the simulator."""
    once = {plan.stages: plan for plan in plans}
    best = sorted(once.values(), key=lambda plan: plan.seconds)[:SIMULATED]
    return sorted(best, key=lambda plan: plan.simulated)


def _evaluated(
    profile: LayerProfile, candidates: Iterable[tuple[Stage, ...]], topology: Topology, batch: Batch
) -> list[UnequalPlan]:
    plans = [evaluate(profile, stages, topology, batch) for stages in candidates]
    return [plan for plan in plans if plan is not None]


def _simple(profile: LayerProfile, topology: Topology) -> list[tuple[Stage, ...]]:
    """Data parallelism and pipelines of equally replicated stages, to measure others against."""
    costs = [layer.forward_s + layer.backward_s for layer in profile.layers]
    world = topology.world_size
    found = []
    for count in range(1, min(len(costs), world) + 1):
        if world % count:
            continue
        ends, end = [], 0
        for layers in dealt(costs, count):
            end += layers
            ends.append(end)
        for policy in range(len(POLICIES)):
            found.append(placed(ends, [world // count] * count, [policy] * count, topology))
    return found
