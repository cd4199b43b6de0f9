"""The best cut, replication and placement of a layer profile's stages (DAPPLE, 2007.01045, section
4): dynamic programming over layers planned and devices used, node by node.

The latency has no optimal substructure: a prefix with a longer way down may have the shorter steady
phase. So several prefixes are kept for each state, none that cannot come near the best plan known;
complete plans are then evaluated in closed form, and the best of those in the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np

from workbench.errors import refuse
from workbench.plan.model.layer_profile import LayerProfile
from workbench.plan.stage_partition import dealt
from workbench.planner.unequal_stages.placements import POLICIES, placed
from workbench.planner.unequal_stages.plan import Policies, UnequalPlan, all_policies, evaluate
from workbench.planner.unequal_stages.prefix_search.next_stage import Extension
from workbench.planner.unequal_stages.prefix_search.prefixes import (
    Prefixes,
    best,
    joined,
    no_stages,
    stages_of,
)
from workbench.planner.unequal_stages.prefix_search.transitions import Occupancies
from workbench.planner.unequal_stages.stage_times import Batch, Stage
from workbench.planner.unequal_stages.topology import Topology
from workbench.units import counted

SIMULATED = 10
"""Plans that the simulator ranks."""


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
    near: float = 1.02
    """Prefixes are dropped that cannot come within this factor of the best plan known."""


def search_stages(
    profile: LayerProfile, topology: Topology, batch: Batch, effort: Effort | None = None
) -> list[UnequalPlan]:
    """The best plans that use every device, by the simulator's step time.

    Raises `PlanError` where no plan fits memory.
    """
    plans = near_best(profile, topology, batch, effort or Effort())
    if not plans:
        raise refuse(
            "strategy.pipeline.replicas",
            f"no stages on {topology.world_size} devices fit {topology.memory:g} bytes of memory "
            f"with microbatches of {counted(batch.sequences, 'sequence')}",
        )
    return sorted(plans[:SIMULATED], key=lambda plan: plan.simulated)


def near_best(
    profile: LayerProfile,
    topology: Topology,
    batch: Batch,
    effort: Effort,
    limit: float = math.inf,
    policies: Policies = all_policies,
    occupancies: Occupancies | None = None,
) -> list[UnequalPlan]:
    """Plans that use every device, each once, the best in closed form first; none where memory or
    `limit` allows none.

    Args:
        profile: Layers.
        topology: Devices, links and memory.
        batch: What a step trains on.
        effort: How much is kept.
        limit: Seconds of a step, of which a plan may take `effort.near` times as many.
        policies: Warm-up policies that a number of stages may have.
        occupancies: Of devices as many, from searches before.
    """
    occupancies, most = occupancies or Occupancies(topology), limit * effort.near

    def evaluated(candidates: Iterable[tuple[Stage, ...]]) -> list[UnequalPlan]:
        plans = (evaluate(profile, one, topology, batch, policies(len(one))) for one in candidates)
        return [plan for plan in plans if plan is not None and plan.seconds <= most]

    plans = evaluated(_simple(profile, topology))
    for layer in effort.layers:
        limit = min([limit, *(plan.seconds for plan in plans)])
        extension = Extension(profile, topology, occupancies, batch, limit * effort.near)
        plans += evaluated(_complete(extension, effort.prefixes, layer)[: effort.plans])
    once = {plan.stages: plan for plan in plans}
    return sorted(once.values(), key=lambda plan: plan.seconds)


def _complete(extension: Extension, each: int, most: int) -> list[tuple[Stage, ...]]:
    """Stages of the plans on all devices that the search comes to, the best by pivot paths first.

    `each` prefixes are kept of a layer and occupancy, `most` of a layer.
    """
    layers = len(extension.profile.layers)
    kept: dict[int, Prefixes] = {}
    waiting: list[list[Prefixes]] = [[] for _ in range(layers + 1)]
    waiting[0].append(no_stages())
    for layer in range(layers + 1):
        if waiting[layer]:
            kept[layer] = best(joined(waiting[layer]), each, most)
            waiting[layer] = []
            if layer < layers:
                for end, found in extension.extend(layer, kept[layer]):
                    waiting[end].append(found)
    if layers not in kept:
        return []
    order = np.argsort(kept[layers].bound, kind="stable").tolist()
    return [stages_of(kept, layers, i, extension.topology) for i in order]


def _simple(profile: LayerProfile, topology: Topology) -> list[tuple[Stage, ...]]:
    """Data parallelism and pipelines of equally replicated stages, to measure others against."""
    world = topology.world_size
    found: dict[tuple[Stage, ...], None] = {}
    for count in range(1, min(len(profile.layers), world) + 1):
        if world % count:
            continue
        for policy in range(len(POLICIES)):
            each = [world // count] * count
            found[placed(even_ends(profile, count), each, [policy] * count, topology)] = None
    return list(found)


def even_ends(profile: LayerProfile, stages: int) -> tuple[int, ...]:
    """Layers before which stages end whose slowest is as quick as may be."""
    costs = tuple(layer.forward_s + layer.backward_s for layer in profile.layers)
    return _even_ends(costs, stages)


@lru_cache(maxsize=256)
def _even_ends(costs: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """Layers before which stages end, the costliest costing least."""
    return tuple(accumulate(dealt(list(costs), stages)))
