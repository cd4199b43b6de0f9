"""Stages that keep little: of every combination and number of stages an even cut, of which those
are kept that no other beats in both seconds and memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from workbench.plan.rules import legal_sizes
from workbench.plan.stage_replicas import even_parts
from workbench.planner.search.results.pareto_front import unbeaten
from workbench.planner.search.unequal.combinations import Combination
from workbench.planner.search.unequal.staged_plan import StagedPlan
from workbench.planner.unequal_stages.placements import APPEND, placed
from workbench.planner.unequal_stages.plan import Policies, evaluate
from workbench.planner.unequal_stages.search import even_ends

EVERY = 16
"""Replicas up to which every number of stages is tried; of more, those that divide them."""


def lean_stages(combinations: Iterable[Combination], policies: Policies) -> list[StagedPlan]:
    """Plans from the fastest to the one that keeps least, none beaten in both, fastest first."""
    plans = (
        staged for one in combinations for staged in _even_plans(one, policies) if staged.sayable
    )
    return unbeaten(plans, lambda staged: (staged.seconds, staged.memory))


def _even_plans(one: Combination, policies: Policies) -> Iterator[StagedPlan]:
    """Stages that take as long and have as many replicas as each other, nearly; the first ones,
    which keep most microbatches, have the replicas that are left over.
    """
    profile, ranks = one.layers.profile, one.topology.world_size
    counts = range(1, ranks + 1) if ranks <= EVERY else legal_sizes.divisors(ranks)
    for count in counts:
        if count > len(profile.layers) or not (allowed := policies(count)):
            continue
        replicas = [stop - start for start, stop in even_parts(ranks, count)]
        stages = placed(even_ends(profile, count), replicas, [APPEND] * count, one.topology)
        if plan := evaluate(profile, stages, one.topology, one.batch, allowed):
            yield StagedPlan(one, plan)
