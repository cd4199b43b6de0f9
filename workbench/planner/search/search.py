"""The search: every legal plan of a space evaluated, the best kept, and the reason where none is
left.
"""

from __future__ import annotations

import math
import time as clock
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from workbench.costmodel.inputs.rank_workload import workload
from workbench.costmodel.memory.reported_memory import probability_of_running_out
from workbench.costmodel.step_time import step_time
from workbench.errors import PlanError, Problem, refuse
from workbench.fields.bounds import RANKS, TRAINED, hold
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner.assumed_hardware import assumed_hardware
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.estimated_timeline import simulated_step_seconds, simulated_timeline
from workbench.planner.framework_limits import framework_limits
from workbench.planner.plan_conditions import Condition
from workbench.planner.published_steps import beyond_published
from workbench.planner.search import result_tables
from workbench.planner.search.candidate_figures import CandidateFigures
from workbench.planner.search.constraints import (
    check_bounds,
    condition_words,
    parse_constraint,
    searched_values,
)
from workbench.planner.search.pareto_front import RankedCandidate
from workbench.planner.search.search_space import SPACES, SearchSpace, candidate_plan, search_space
from workbench.planner.search.space_scan import SearchStats, scan_space
from workbench.planner.search.strategy_summary import strategy_summary
from workbench.planner.step_interval import estimated_interval
from workbench.units import GIB

DOUBLINGS = 5
"""Of the GPUs, that are tried for a deadline."""
OBJECTIVES = ("time", "cost", "energy", "gpus")


@dataclass(frozen=True)
class Candidate:
    """One plan that was found."""

    plan: Plan
    seconds: float
    """Of a step whose allocator does not retry, estimated."""
    peak_bytes: float
    """Largest peak of any rank, estimated."""
    score: float
    """What the objective ranks by; less is better."""
    step_tokens: int = 0
    """Tokens of a step; the plan itself may leave its sequence length to the model."""
    risk: float = 0.0
    """Probability of running out of memory."""
    slowdown: float = 1.0
    """Expected multiple of the step time by the allocator's retries on a nearly full GPU."""
    mfu: float = 0.0
    """Model FLOPs utilization at `seconds`."""
    published: Mapping[str, Any] = field(default_factory=dict)
    """What was published near it (`published_steps.published_beside`); empty on CPUs."""
    resolved: ResolvedPlan | None = field(default=None, compare=False, repr=False)
    """The plan, complete, of the best few."""

    @cached_property
    def simulated(self) -> float | None:
        """The step by event simulation, of the best few; when it is asked for, for it takes longer
        than to search a hundred thousand plans.
        """
        return None if self.resolved is None else _simulated(self.resolved)

    @cached_property
    def interval(self) -> tuple[float, float]:
        """(low, high) seconds of nine of ten steps; when it is asked for, as `simulated`."""
        return estimated_interval(self.resolved or self.plan.resolve())

    @property
    def expected_seconds(self) -> float:
        """Of a step, with the slow-down that is expected of a nearly full GPU: what is ranked."""
        return self.seconds * self.slowdown

    @property
    def promise(self) -> str:
        """That its MFU is above everything published near it; else nothing."""
        return beyond_published(self.published, self.mfu)

    def to_json(self) -> dict[str, Any]:
        """For machines; the plan as what was changed in it."""
        return {
            "source": "estimated",
            "seconds": self.seconds,
            "step_seconds_90": list(self.interval),
            "expected_seconds": self.expected_seconds,
            "expected_slowdown": self.slowdown,
            "simulated_seconds": self.simulated,
            "peak_gib": self.peak_bytes / GIB,
            "probability_of_running_out": self.risk,
            "score": self.score,
            "tokens_per_second": self.step_tokens / self.seconds,
            "model_flops_utilisation": self.mfu,
            "published": {**self.published, "promise": self.promise or None}
            if self.published
            else None,
            "gpus": self.plan.world_size,
            "strategy": strategy_summary(self.plan),
            "plan": self.plan.model_dump(exclude_unset=True),
        }


@dataclass(frozen=True)
class SearchResult:
    """What a search found. `candidates` are distinct legal plans, all of them evaluated."""

    objective: str
    candidates: int
    feasible: int
    seconds: float
    """That the search took."""
    top: tuple[Candidate, ...]
    pareto: tuple[Candidate, ...]
    """Fastest first: those that no other beats in both step time and peak."""
    empty: str = ""
    """Where nothing is left: why, and what to change."""
    most: int = 1000
    """Plans of a table, as asked."""
    tokens: float | None = None
    """To train, where they were given: tables then say days and cost."""
    price_per_hour: float | None = None
    """Of one GPU, USD, where it is known."""
    gpus: int | None = None
    """Of the plan that was asked about."""
    assumed: str = ""
    """What the description of its GPU leaves out, and what stands for it."""

    def __repr__(self) -> str:
        return result_tables.search_result_text(self)

    def _repr_html_(self) -> str:
        """The tables, as a notebook shows them."""
        return result_tables.as_html(self)

    @property
    def rate(self) -> float:
        """Candidates a second."""
        return self.candidates / max(self.seconds, 1e-9)

    def bill(self, one: Candidate) -> dict[str, float | None]:
        """Days and USD that the asked tokens take under a plan, estimated; nothing where none were
        asked.
        """
        if self.tokens is None:
            return {}
        days = one.expected_seconds * self.tokens / one.step_tokens / 86400
        price = self.price_per_hour
        return {
            "days": days,
            "dollars": None if price is None else 24 * days * one.plan.world_size * price,
        }

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "objective": self.objective,
            "candidates": self.candidates,
            "feasible": self.feasible,
            "seconds": self.seconds,
            "rate_per_second": self.rate,
            "empty": self.empty or None,
            "assumed_hardware": self.assumed or None,
            "top": [one.to_json() | self.bill(one) for one in self.top],
            "pareto": [one.to_json() | self.bill(one) for one in self.pareto],
        }


def search(
    plan: Plan,
    objective: str = "time",
    *,
    space: str = "default",
    top: int = 10,
    where: Sequence[str] = (),
    deadline_days: float | None = None,
    tokens: float | None = None,
    risk: float = SearchSpace.risk,
) -> SearchResult:
    """The best plans for the model, GPUs, batch and precision of `plan`; its strategy is what is
    searched for.

    `space`: `default`; `wide`, with more schedules, placements and sharding; `vast`, with kernels
    (as written in the others), grids of tensor ranks, sizes of buckets and gradient dtypes too.
    Unequal replicas are not searched. `objective`: `time` of a step on all GPUs; `cost`
    (GPU-hours a token), `energy`, `gpus` (fewest that fit) try fewer GPUs too. `where`:
    conditions such as `strategy.tensor.size<=8`. `deadline_days` keeps what trains `tokens` in
    time. `risk`: largest probability of running out of memory; what a nearly full GPU is expected
    to slow a step down by is in the rank. Raises `PlanError` for words and
    numbers that mean nothing, not for a search that finds nothing.
    """
    began = clock.perf_counter()
    _check_options(objective, space, top, deadline_days, tokens, risk)
    constraints = [parse_constraint(text) for text in where]
    whole = replace(search_space(plan, space, _gpu_counts(plan, objective)), risk=risk)
    check_bounds(whole, constraints)
    if deadline_days is not None and tokens is not None:
        constraints.append(_deadline_constraint(whole, deadline_days, tokens))
    seen = scan_space(whole, constraints, objective, top)
    why = "" if seen.feasible else _why_empty(whole, constraints, seen)
    if not seen.feasible and deadline_days is not None and tokens is not None:
        why += _deadline_advice(plan, whole, constraints[:-1], deadline_days, tokens)
    beside = CandidateFigures(whole)
    best, front = (
        tuple(_candidate(whole, one, beside) for one in some)
        for some in (seen.best.top, seen.best.front)
    )
    best = tuple(replace(one, resolved=one.plan.resolve()) for one in best)
    return SearchResult(
        objective,
        seen.candidates,
        seen.feasible,
        clock.perf_counter() - began,
        best,
        front,
        why,
        top,
        tokens,
        whole.base.gpu.price_per_hour,
        plan.cluster.gpus,
        assumed_hardware(whole.base),
    )


def _deadline_constraint(space: SearchSpace, days: float, tokens: float) -> Condition:
    """The longest step that trains the tokens in time."""
    longest = days * 86400 * space.batch * space.base.training.sequence_length / tokens
    return Condition(f"deadline of {days:g} days", "expected_seconds", "<=", longest)


def _deadline_advice(
    plan: Plan, whole: SearchSpace, others: Sequence[Condition], days: float, tokens: float
) -> str:
    """The days of the fastest plan, and the first doubling of the GPUs that is in time; "" where no
    plan is left.
    """
    left = scan_space(whole, others, "time", 1)
    if not left.feasible:
        return ""
    takes = left.best.top[0].expected / _deadline_constraint(whole, days, tokens).value * days
    needs = f"; it needs {takes:,.3g} days for {tokens:g} tokens"
    for more in range(1, DOUBLINGS + 1):
        gpus = plan.cluster.gpus * 2**more
        more_gpus = plan.replace(**{"cluster.gpus": gpus, "cluster.nodes": None})
        space = replace(search_space(more_gpus), risk=whole.risk)
        limit = _deadline_constraint(space, days, tokens)
        if (
            gpus <= RANKS.most
            and (found := scan_space(space, [*others, limit], "time", 1)).feasible
        ):
            in_time = found.best.top[0].expected / limit.value * days
            return f"{needs}; {gpus:,} GPUs would do, in {in_time:,.3g} days (estimated)"
    return f"{needs}; {2**DOUBLINGS} times the GPUs would not do either (estimated)"


def _candidate(space: SearchSpace, found: RankedCandidate, beside: CandidateFigures) -> Candidate:
    plan = candidate_plan(space, found.cell.choice(found.candidate_index))
    gpus = found.cell.fixed.world_size
    return Candidate(
        plan,
        found.seconds,
        found.peak,
        found.score,
        step_tokens=space.batch * space.base.training.sequence_length,
        risk=beside.risk(found.peak),
        slowdown=beside.slowdown(found.peak),
        mfu=beside.utilization(plan, found.seconds, gpus),
        published=beside.published(gpus),
    )


def _simulated(plan: ResolvedPlan) -> float | None:
    """The step of a plan by event simulation, where there is a pipeline to simulate."""
    if plan.strategy.pipeline.size == 1:
        return None
    full, k = with_calibration(plan)
    w = workload(full)
    time = step_time(w, k)
    return simulated_step_seconds(w, time, *simulated_timeline(w, time.durations))


def _gpu_counts(plan: Plan, objective: str) -> tuple[int, ...]:
    """All GPUs where only time counts; else halves of them too."""
    worlds = [plan.cluster.gpus]
    while objective != "time" and plan.cluster.nodes is None and worlds[-1] % 2 == 0:
        worlds.append(worlds[-1] // 2)
    return tuple(worlds)


def _why_empty(whole: SearchSpace, constraints: Sequence[Condition], seen: SearchStats) -> str:
    """Which condition emptied the search, and what would be found without it."""
    if constraints:
        for number, c in enumerate(constraints):
            others = [*constraints[:number], *constraints[number + 1 :]]
            if (left := scan_space(whole, others, "time", 1)).feasible:
                best = left.best.top[0]
                fastest = (
                    f"the fastest takes {best.seconds:.3g} s a step and "
                    f"{best.peak / GIB:.1f} GiB (estimated)"
                )
                of = ", ".join(condition_words(searched_values(whole, c)))
                values = f" (searched: {of})" if of else ""
                return (
                    f"no plan meets '{c.text}'{values}; without it {left.feasible:,} do, {fastest}"
                    f"{_limit_words(whole, c.field)}"
                )
        if len(constraints) > 1 and (left := scan_space(whole, (), "time", 1)).feasible:
            quoted = ", ".join(f"'{c.text}'" for c in constraints)
            return f"no plan meets {quoted} together; without them {left.feasible:,} do"
    gpu, s = whole.fixed_configs[0].gpu, whole.fixed_configs[0]
    if not seen.candidates:
        return (
            f"no combination of axes divides {s.world_size} GPUs and a batch of {s.global_batch} "
            f"sequences; change cluster.gpus or training.global_batch{_limit_words(whole)}"
        )
    least, stack = seen.least_peak_bytes, whole.base.strategy.stack
    chance = probability_of_running_out(least, gpu.memory_gib * GIB, stack)
    riskier = f" allow --risk {math.ceil(100 * chance) / 100:g}," if chance < 0.5 else ""
    return (
        f"no plan fits {gpu.name} of {gpu.memory_gib:.1f} GiB with a chance of running out of "
        f"memory of at most {whole.risk:.0%}: the smallest of {seen.candidates:,} peaks at "
        f"{least / GIB:.1f} GiB, a chance of {chance:.0%} (estimated);{riskier} change "
        f"cluster.gpu, cluster.gpus, the sequence length or the model"
    )


def _limit_words(space: SearchSpace, field: str = "") -> str:
    """What the framework cannot do about a field, or at all."""
    limits = framework_limits(space.base.strategy.stack)
    named = [
        str(limit)
        for limit in limits
        if not field
        or any(c.field.rpartition(".")[0] == field.rpartition(".")[0] for c in limit.when)
    ]
    return "".join(f"; {words}" for words in named)


def _check_options(
    objective: str, space: str, top: int, deadline: float | None, tokens: float | None, risk: float
) -> None:
    for option, value, known in (
        ("--objective", objective, OBJECTIVES),
        ("--space", space, SPACES),
    ):
        if value not in known:
            raise refuse(option, f"is '{value}'; legal: {', '.join(known)}")
    if not 0 < risk < 1:
        raise refuse("--risk", f"is {risk:g}; legal: a probability above 0 and below 1, e.g. 0.05")
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


__all__ = ["OBJECTIVES", "Candidate", "SearchResult", "search", "strategy_summary"]
