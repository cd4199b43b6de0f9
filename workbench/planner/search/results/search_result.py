"""What a search found: plans with what is estimated of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from workbench.costmodel.step_time import step_time
from workbench.plan.model.layer_profile_file import profiled_model
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import estimated_only
from workbench.plan.schema import Plan
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.estimated_timeline import simulated_step_seconds, simulated_timeline
from workbench.planner.operator_plans.planned_workload import planned_workload
from workbench.planner.published_steps import beyond_published
from workbench.planner.search.results import result_tables
from workbench.planner.search.results.stage_figures import StageFigures
from workbench.planner.search.results.strategy_summary import strategy_summary
from workbench.planner.step_interval import estimated_interval
from workbench.planner.unequal_stages.other_planners import PlannerFigures
from workbench.units import GIB


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
    risk: float | None = 0.0
    """Probability of running out of memory; None where it is not known, on a layer profile."""
    slowdown: float = 1.0
    """Expected multiple of the step time by the allocator's retries on a nearly full GPU."""
    mfu: float | None = 0.0
    """Model FLOPs utilization at `seconds`; None on a layer profile, whose FLOPs are not known."""
    published: Mapping[str, Any] = field(default_factory=dict)
    """What was published near it (`published_steps.published_beside`); empty on CPUs."""
    stages: StageFigures | None = None
    """Of the unequal space alone."""
    reason: str = ""
    """Why its stages are what they are, of spaces whose stages are divided."""
    twins: tuple[str, ...] = ()
    """Where other plans have the same figures: in which words of the strategy each differs."""
    resolved: ResolvedPlan | None = field(default=None, compare=False, repr=False)
    """The plan, complete, of the best few."""

    @cached_property
    def simulated(self) -> float | None:
        """The step by event simulation, of the best few; when it is asked for, for it takes longer
        than to search a hundred thousand plans. On a layer profile every step is the simulator's.
        """
        if profiled_model(self.plan.model):
            return self.seconds
        return None if self.resolved is None else _simulated(self.resolved)

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """(low, high) seconds of nine of ten steps; when it is asked for, as `simulated`. None on a
        layer profile.
        """
        full = self.resolved or self.plan.resolve()
        return None if full.profiled else estimated_interval(full)

    @property
    def expected_seconds(self) -> float:
        """Of a step, with the slow-down that is expected of a nearly full GPU: what is ranked."""
        return self.seconds * self.slowdown

    @property
    def promise(self) -> str:
        """That its MFU is above everything published near it; else nothing."""
        return "" if self.mfu is None else beyond_published(self.published, self.mfu)

    def to_json(self) -> dict[str, Any]:
        """For machines; the plan as what was changed in it."""
        return {
            "source": "estimated",
            "seconds": self.seconds,
            "step_seconds_90": self.interval and list(self.interval),
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
            **({"same_figures": list(self.twins)} if self.twins else {}),
            **({"stages": self.stages.to_json()} if self.stages else {}),
            **({"reason": self.reason} if self.reason else {}),
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
    layer_times: str = ""
    """On what the times of a layer profile were measured."""
    of_stages: bool = False
    """Whether stages were searched each by itself: `candidates` are then combinations of all
    else.
    """
    divided: int | None = None
    """Of the space of operators: plans of the best divisions, all of them estimated; `candidates`
    are then choices of submesh, microbatch and ZeRO stage that were divided into stages.
    """
    baselines: tuple[PlannerFigures, ...] = ()
    """Of the unequal space: other planners on the layers of the first plan."""
    notes: tuple[str, ...] = ()
    """Sentences on what was found, whichever plan is first."""

    @property
    def every_note(self) -> list[str]:
        """`notes`, and that the first plan cannot be run, where a layer profile does not say so of
        every plan.
        """
        first = self.top[0].resolved if self.top else None
        why = estimated_only(first) if first and not first.profiled else ""
        return [*self.notes, *([f"the first plan {why}"] if why else [])]

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
            **({"layer_times": self.layer_times} if self.layer_times else {}),
            "top": [one.to_json() | self.bill(one) for one in self.top],
            "pareto": [one.to_json() | self.bill(one) for one in self.pareto],
            **({"baselines": [one.to_json() for one in self.baselines]} if self.baselines else {}),
            **({"notes": self.every_note} if self.every_note else {}),
        }


def _simulated(plan: ResolvedPlan) -> float | None:
    """The step of a plan by event simulation, where there is a pipeline to simulate."""
    if plan.strategy.pipeline.size == 1:
        return None
    full, k = with_calibration(plan)
    w = planned_workload(full)
    time = step_time(w, k)
    return simulated_step_seconds(w, time, *simulated_timeline(w, time.durations))
