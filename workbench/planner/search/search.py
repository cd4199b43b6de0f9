"""The search: every legal plan of a space evaluated, the best kept, and the reason where none is
left.
"""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from workbench.costmodel.inputs.held_counts import read_kept_counts, write_kept_counts
from workbench.errors import PlanError, Problem, refuse
from workbench.fields.bounds import TRAINED, hold
from workbench.plan.model.layer_profile_file import profiled_model
from workbench.plan.schema import Plan
from workbench.planner.assumed_hardware import assumed_hardware
from workbench.planner.plan_conditions import Condition, check_risk
from workbench.planner.profiled_models.measured_on import measured_on
from workbench.planner.search.constraints import check_bounds, parse_constraint
from workbench.planner.search.joint.joint_search import JointFound, search_joint
from workbench.planner.search.joint.joint_space import joint_space
from workbench.planner.search.results.candidate_figures import CandidateFigures
from workbench.planner.search.results.empty_search import (
    Left,
    deadline_advice,
    deadline_constraint,
    look_in,
    which_condition,
    why_no_stages_fit,
    why_none_fits,
)
from workbench.planner.search.results.search_result import SearchResult
from workbench.planner.search.search_space import SPACES, SearchSpace, neutral_plan, search_space
from workbench.planner.search.space_scan import scan_space
from workbench.planner.search.unequal.unequal_search import (
    Progress,
    UnequalFound,
    pareto,
    search_unequal,
)
from workbench.planner.search.unequal.unequal_space import unequal_space

OBJECTIVES = ("time", "cost", "energy", "gpus")
Divide = Callable[[SearchSpace, Sequence[Condition], str, Progress], UnequalFound | JointFound]
DIVIDED: dict[str, tuple[Callable[..., SearchSpace], Divide]] = {
    "unequal": (unequal_space, search_unequal),
    "operators": (joint_space, search_joint),
}
"""Spaces whose stages are divided, so that not every plan is evaluated: how each is built and
searched.
"""


def search(
    plan: Plan,
    objective: str = "time",
    *,
    space: str | None = None,
    top: int = 10,
    where: Sequence[str] = (),
    deadline_days: float | None = None,
    tokens: float | None = None,
    risk: float = SearchSpace.risk,
    progress: Progress = lambda words: None,
) -> SearchResult:
    """The best plans for the model, GPUs, batch and precision of `plan`; its strategy is what is
    searched for.

    `space`: `default`, but for a layer profile, whose only one is `unequal`; `wide`, with more
    schedules, placements and sharding; `vast`, with kernels (as written in the others), grids of
    tensor ranks, sizes of buckets and gradient dtypes too; `unequal`, with stages cut and
    replicated each by itself (DAPPLE, 2007.01045); `operators`, with stages, submeshes and the
    strategy of every operator (Alpa, 2201.12023); `progress` then gets words about what is being
    done. `objective`: `time` of a step on all GPUs; `cost`
    (GPU-hours a token), `energy`, `gpus` (fewest that fit) try fewer GPUs too. `where`:
    conditions such as `strategy.tensor.size<=8`. `deadline_days` keeps what trains `tokens` in
    time. `risk`: largest probability of running out of memory; what a nearly full GPU is expected
    to slow a step down by is in the rank. Raises `PlanError` for words and
    numbers that mean nothing, not for a search that finds nothing.
    """
    began = clock.perf_counter()
    check_options(objective, space, top, deadline_days, tokens, risk)
    space = _space_of_model(plan, space)
    constraints = [parse_constraint(text) for text in where]
    build, divide = DIVIDED.get(space, (partial(search_space, kind=space), None))
    whole = replace(build(plan, worlds=gpu_counts(plan, objective)), risk=risk)
    check_bounds(whole, constraints)
    if deadline_days is not None and tokens is not None:
        constraints.append(deadline_constraint(whole, deadline_days, tokens))
    if divide is not None:
        found = _of_divisions(whole, divide, constraints, objective, top, progress)
    else:
        read_kept_counts()
        found = _of_space(whole, constraints, objective, top)
        write_kept_counts()
        if not found.top and deadline_days is not None and tokens is not None:
            advice = deadline_advice(plan, whole, constraints[:-1], deadline_days, tokens)
            found = replace(found, empty=found.empty + advice)
    best = tuple(replace(one, resolved=one.plan.resolve()) for one in found.top)
    return replace(
        found,
        seconds=clock.perf_counter() - began,
        top=best,
        most=top,
        tokens=tokens,
        price_per_hour=whole.base.gpu.price_per_hour,
        gpus=plan.cluster.gpus,
        assumed=assumed_hardware(whole.base),
        layer_times=measured_on(whole.base),
    )


def _space_of_model(plan: Plan, space: str | None) -> str:
    """The space; of a layer profile, whose stages alone are free, the unequal one."""
    profiled = profiled_model(plan.model)
    if profiled is None or space == "unequal":
        return space or "default"
    if space:
        raise refuse(
            "--space",
            f"is '{space}', and '{profiled.layer_profile}' is a layer profile, of which nothing "
            "but the stages is free; legal: unequal",
        )
    return "unequal"


def _of_space(
    space: SearchSpace, constraints: Sequence[Condition], objective: str, top: int
) -> SearchResult:
    """Of a space of which every plan is evaluated."""
    seen, beside = scan_space(space, constraints, objective, top), CandidateFigures(space)
    best, front = (tuple(map(beside.of, some)) for some in (seen.best.top, seen.best.front))
    why = ""
    if not seen.feasible:
        why = which_condition(space, constraints, look_in(space)) or why_none_fits(space, seen)
    return SearchResult(objective, seen.candidates, seen.feasible, 0.0, best, front, why)


def _of_divisions(
    space: SearchSpace,
    divide: Divide,
    constraints: Sequence[Condition],
    objective: str,
    top: int,
    progress: Progress,
) -> SearchResult:
    """Of a space of `DIVIDED`."""

    def look(conditions: Sequence[Condition]) -> Left | None:
        left = divide(space, conditions, "time", progress).candidates
        return Left(len(left), left[0].seconds, left[0].peak_bytes) if left else None

    found, why = divide(space, constraints, objective, progress), ""
    if not found.candidates:
        why = which_condition(space, constraints, look) or why_no_stages_fit(space)
    best, front = found.candidates[:top], pareto(found.candidates)
    counts, of_stages = (found.combinations, len(found.candidates)), isinstance(found, UnequalFound)
    baselines = found.baselines if isinstance(found, UnequalFound) else ()
    return SearchResult(
        objective,
        *counts,
        0.0,
        best,
        front,
        why,
        of_stages=of_stages,
        divided=found.plans if isinstance(found, JointFound) else None,
        baselines=baselines,
        notes=found.notes,
    )


def gpu_counts(plan: Plan, objective: str) -> tuple[int, ...]:
    """All GPUs where only time counts; else half of them too, rounded down, and so on to one, where
    nodes of one size hold so many.
    """
    every = plan.cluster.gpus
    if objective == "time" or plan.cluster.nodes is not None:
        return (every,)
    fewer = [every >> times for times in range(1, every.bit_length())]
    return (every, *(gpus for gpus in fewer if _fill_nodes(plan, gpus)))


def _fill_nodes(plan: Plan, gpus: int) -> bool:
    """Whether so many GPUs of the plan are a legal cluster."""
    try:
        neutral_plan(plan, gpus)
    except PlanError as error:
        return not any(problem.field.startswith("cluster.") for problem in error.problems)
    return True


def check_options(
    objective: str,
    space: str | None,
    top: int,
    deadline: float | None,
    tokens: float | None,
    risk: float,
) -> None:
    """Refuse words and numbers that mean nothing. Raises `PlanError`."""
    for option, value, known in (
        ("--objective", objective, OBJECTIVES),
        ("--space", space, SPACES),
    ):
        if value is not None and value not in known:
            raise refuse(option, f"is '{value}'; legal: {', '.join(known)}")
    check_risk(risk)
    if not 1 <= top <= 1000:
        raise refuse("--top", f"is {top}; legal: 1 to 1000")
    for name, number in (("--deadline", deadline), ("--tokens", tokens)):
        if number is not None and not 0 < number < float("inf"):
            raise refuse(name, f"is {number}; legal: a number above 0")
    if tokens is not None:
        hold("--tokens", tokens, 0, TRAINED)
    if deadline is not None and tokens is None:
        raise PlanError(
            [Problem("--deadline", "needs --tokens: how many are to be trained by then")]
        )
