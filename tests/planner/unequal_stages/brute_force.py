"""Every cut, replication and placement by the three policies, evaluated one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

from tests.planner.unequal_stages import drawn
from workbench.plan.model.layer_profile import LayerProfile
from workbench.planner.unequal_stages.memory import activation_bytes, stage_state_bytes
from workbench.planner.unequal_stages.placements import POLICIES, placed
from workbench.planner.unequal_stages.plan import UnequalPlan, evaluate
from workbench.planner.unequal_stages.search import search_stages
from workbench.planner.unequal_stages.stage_times import Batch, Stage
from workbench.planner.unequal_stages.topology import Counts, Topology

Instance = tuple[LayerProfile, Topology, Batch]


def instance(seed: int) -> Instance:
    """Up to 8 layers and 8 devices; a third have little memory."""
    draw = random.Random(seed)
    layers = draw.randint(2, 8)
    profile = drawn.profile(draw, layers, 4)
    topology = drawn.topology(draw, draw.randint(2, 8))
    batch = drawn.batch(draw, min(layers, topology.world_size), topology.world_size)
    if not draw.randrange(3):
        batch = replace(batch, optimizer_factor=4.0)
        whole = Stage(0, layers, (1,))
        share = draw.uniform(0.4, 1.5)
        size = stage_state_bytes(profile, whole, batch) + activation_bytes(profile, whole, batch)
        topology = replace(topology, memory=share * size)
    return profile, topology, batch


def one_by_one(used: Counts, previous: Counts, policy: str, replicas: int, devices: int) -> Counts:
    """What `place` gives, device by device."""
    nodes = sorted(range(len(used)), key=lambda n: (-used[n], -previous[n], n))
    free = {n: devices - used[n] for n in nodes}
    given = dict.fromkeys(nodes, 0)
    for _ in range(replicas):
        left = [n for n in nodes if given[n] < free[n]]
        early = [n for n in left if bool(used[n]) != (policy == "fresh")] or left
        turn = min(early, key=lambda n: given[n]) if policy == "scatter" else early[0]
        given[turn] += 1
    return tuple(given[n] for n in range(len(used)))


def _ordered_sums(total: int) -> Iterator[tuple[int, ...]]:
    if not total:
        yield ()
    for first in range(1, total + 1):
        for rest in _ordered_sums(total - first):
            yield (first, *rest)


def best(profile: LayerProfile, topology: Topology, batch: Batch) -> UnequalPlan | None:
    """The plan with the least seconds in closed form. Those whose slowest stage alone takes longer
    than another's step are passed over.
    """
    layers = len(profile.layers)
    found: UnequalPlan | None = None
    for replicas in sorted(_ordered_sums(topology.world_size), key=len):
        stages = len(replicas)
        if stages > layers or not all(batch.takes(count) for count in replicas):
            continue
        ways = list(product(range(len(POLICIES)), repeat=stages))
        unit = [placed(range(1, stages + 1), replicas, way, topology) for way in ways]
        places = {tuple(stage.counts for stage in way) for way in unit}
        for cuts in combinations(range(1, layers), stages - 1):
            bounds = (0, *cuts, layers)
            if found and _slowest(profile, bounds, replicas, batch) >= found.seconds:
                continue
            for counts in places:
                cut = [Stage(a, b, c) for a, b, c in zip(bounds, bounds[1:], counts)]
                plan = evaluate(profile, cut, topology, batch)
                if plan and (found is None or plan.seconds < found.seconds):
                    found = plan
    return found


def _slowest(
    profile: LayerProfile, bounds: tuple[int, ...], replicas: tuple[int, ...], batch: Batch
) -> float:
    both = [f + b for f, b in zip(profile.forward, profile.backward)]
    return batch.microbatches * max(
        float(batch.of_profile(count, profile)) * (both[end] - both[first])
        for count, first, end in zip(replicas, bounds, bounds[1:])
    )


def gap(seed: int) -> float:
    """How much slower the search's best is than the best of all, in closed form; 0 where no plan
    fits and the search says so.
    """
    profile, topology, batch = instance(seed)
    known = best(profile, topology, batch)
    try:
        found = min(plan.seconds for plan in search_stages(profile, topology, batch))
    except ValueError:
        return 0.0 if known is None else float("inf")
    assert known is not None
    return found / known.seconds - 1
