"""A search's answer as people read it: the simplest first of plans that an estimate cannot tell
apart, twins in one row, and what other kernels would do where none were tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from workbench.errors import PlanError
from workbench.plan.schema import Plan, axis_sizes
from workbench.planner.explain.plan_figures import explained_plan
from workbench.planner.explain.sensitivity import kernel_effects
from workbench.planner.plan_changes import OFFLOAD_KINDS
from workbench.planner.search.results.search_result import Candidate, SearchResult
from workbench.planner.search.results.strategy_summary import strategy_summary
from workbench.units import gib_text, percent_text, seconds_text

LOOKED_AT = 20
"""Best plans among which the simplest is looked for, however few are asked for."""
WORTH_SAYING = 0.01
"""Share of a step that other kernels save, from which on they are named."""


def presented(found: SearchResult, most: int, kernels_tried: bool) -> SearchResult:
    """`found` for people.

    Args:
        found: Its best plans, at least `LOOKED_AT` where there are so many, best first.
        most: Plans to keep.
        kernels_tried: Whether the space has several kernels.
    """
    folded = _folded(found.top)
    told_apart = found.of_stages or found.divided is not None
    top = folded if told_apart else _simplest_first(folded, found.objective)
    notes = [] if kernels_tried or not top else _untried_kernels(top[0])
    if top and top[0] is not folded[0]:
        notes.insert(0, _why_first(folded[0]))
    return replace(found, top=tuple(top[:most]), most=most, notes=(*notes, *found.notes))


def _folded(plans: Iterable[Candidate]) -> list[Candidate]:
    """Plans of equal figures once, as the simplest of them, which names what else it could be."""
    groups: list[list[Candidate]] = []
    for one in plans:
        if groups and _is_twin(groups[-1][0], one):
            groups[-1].append(one)
        else:
            groups.append([one])
    return [_of_twins(sorted(twins, key=lambda one: _machinery(one.plan))) for twins in groups]


def _is_twin(one: Candidate, other: Candidate) -> bool:
    figures = zip(
        (one.seconds, one.peak_bytes, one.score), (other.seconds, other.peak_bytes, other.score)
    )
    return one.stages is None and all(math.isclose(a, b) for a, b in figures)


def _of_twins(twins: list[Candidate]) -> Candidate:
    own = strategy_summary(twins[0].plan).split(" · ")
    others = (strategy_summary(one.plan).split(" · ") for one in twins[1:])
    more = (" · ".join(part for part in other if part not in own) for other in others)
    return replace(twins[0], twins=tuple(more))


def _machinery(plan: Plan) -> tuple[int, int, int]:
    """How much a strategy needs: offloading; ZeRO stage and axes beside data; the stage alone."""
    s, sizes = plan.strategy, axis_sizes(plan.strategy, plan.world_size)
    axes = [sizes[axis] for axis in ("tensor", "context", "pipeline")] + [s.expert.size]
    offload = OFFLOAD_KINDS.index(s.data.offload) + s.offload_activations
    return offload, s.data.zero + sum(size > 1 for size in axes), s.data.zero


def _simplest_first(plans: list[Candidate], objective: str) -> list[Candidate]:
    """Those whose step time, or cost, is within the interval of the best by it, simplest first;
    then the others.
    """
    if not plans or plans[0].interval is None:
        return plans
    first, reach = plans[0], plans[0].interval[1] / plans[0].seconds

    def is_near(one: Candidate) -> bool:
        if objective == "gpus":  # a number of GPUs is no estimate
            same = one.plan.world_size == first.plan.world_size
            return same and one.expected_seconds <= reach * first.expected_seconds
        return one.score <= reach * first.score

    near = sorted((one for one in plans if is_near(one)), key=lambda one: _machinery(one.plan)[:2])
    return [*near, *(one for one in plans if not is_near(one))]


def _why_first(best: Candidate) -> str:
    return (
        f"within the 90 % interval of the best estimate ({seconds_text(best.seconds)}, "
        f"{strategy_summary(best.plan)}) the simplest is first: no offload, lower ZeRO, fewer axes"
    )


def _untried_kernels(first: Candidate) -> list[str]:
    """Sentence on the fastest other kernels, where the first plan would gain by them."""
    try:
        effects = kernel_effects(explained_plan(first.plan))
    except PlanError:
        return []
    best = max(effects, key=lambda effect: effect.speed, default=None)
    if best is None or best.speed < 1 + WORTH_SAYING:
        return []
    kind = best.changes["strategy.kernels"]
    faster = percent_text(1 - best.after.seconds / best.before.seconds)
    return [
        f"kernels are as written, others were not tried: {best.name} would take "
        f"{seconds_text(best.after.seconds)} (-{faster}) and {gib_text(best.after.peak_bytes)} "
        f"under the first plan (estimated); --set strategy.kernels={kind}, or --space vast"
    ]
