"""What a plan needs and how fast it is, in a few numbers, and what a change of it does to them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from workbench.costmodel.memory.peak_memory import peak_memory
from workbench.costmodel.rates.constants import Constants
from workbench.costmodel.step_time import step_time
from workbench.errors import PlanError
from workbench.plan.resolution import with_preset
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.estimate import estimate
from workbench.planner.framework_limits import stays_possible
from workbench.planner.memory_advice import beside_capacity
from workbench.planner.operator_plans.planned_workload import planned_workload
from workbench.planner.plan_changes import Change
from workbench.planner.plan_conditions import USUAL_RISK, check_risk
from workbench.profile import Profile


@dataclass(frozen=True)
class PlanFigures:
    """An estimate in short. Bytes are the maximum over ranks, tokens of the whole job in one
    step.
    """

    seconds: float
    tokens: float
    peak_bytes: int
    capacity_bytes: int
    gpus: int
    exceeds_host: bool
    """Whether a rank offloads more than its share of the host's memory."""
    runs_out: float
    """Probability that a GPU runs out of memory."""
    risk: float = USUAL_RISK
    """Largest such probability of a plan that fits."""

    @property
    def fits(self) -> bool:
        """True where a GPU holds the peak (max rank) within the risk, and the host the rest, as a
        search asks.
        """
        return self.runs_out <= self.risk and self.fit_word != "NO"

    @property
    def fit_word(self) -> str:
        """Word for `fits`, which names a peak that a GPU holds, but not within the risk."""
        if self.peak_bytes > self.capacity_bytes or self.exceeds_host:
            return "NO"
        return "yes" if self.runs_out <= self.risk else "at risk"

    @property
    def tokens_per_second(self) -> float:
        """Of the whole job."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class ChangeEffect:
    """What one change of a plan does: `changes` is what `plan.replace` takes."""

    name: str
    changes: Change
    before: PlanFigures
    after: PlanFigures

    @property
    def seconds_change(self) -> float:
        """Seconds that a step takes longer; below zero where it is faster."""
        return self.after.seconds - self.before.seconds

    @property
    def peak_change(self) -> int:
        """Increase of peak memory in bytes; negative where it decreases."""
        return self.after.peak_bytes - self.before.peak_bytes

    @property
    def speed(self) -> float:
        """Tokens a second over those of the plan itself."""
        return self.after.tokens_per_second / self.before.tokens_per_second

    def to_json(self) -> dict[str, Any]:
        """The figures after the change and what they differ by."""
        return {
            "name": self.name,
            "changes": self.changes,
            "gpus": self.after.gpus,
            "fits": self.after.fits,
            "probability_of_running_out": self.after.runs_out,
            "step_seconds": self.after.seconds,
            "seconds_change": self.seconds_change,
            "seconds_relative": self.after.seconds / self.before.seconds - 1,
            "peak_bytes": self.after.peak_bytes,
            "peak_change": self.peak_change,
            "peak_relative": self.after.peak_bytes / self.before.peak_bytes - 1,
            "speed": self.speed,
        }


@dataclass(frozen=True)
class ExplainedPlan:
    """A plan, complete and estimated once; what is asked of it compares with this."""

    plan: Plan
    resolved: ResolvedPlan
    figures: PlanFigures
    pinned_fields: Change
    """What a preset's rule or a default would decide anew after a change: sizes of axes, the global
    batch.
    """
    given: Profile | None = None
    """Its estimate, where the caller has it."""

    @cached_property
    def profile(self) -> Profile:
        """Its estimate; figures alone need none. Raises `PlanError`."""
        return self.given or estimate(self.plan)

    def effect(self, name: str, change: Change) -> ChangeEffect | None:
        """What `change`, and nothing else, does; None where it is illegal, cannot be estimated, or
        is more than the framework can do.
        """
        changes = {**self.pinned_fields, **change}
        try:
            changed = self.plan.replace(**changes).resolve()
            if not stays_possible(self.resolved, changed):
                return None
            return ChangeEffect(
                name, changes, self.figures, plan_figures(changed, self.figures.risk)
            )
        except PlanError:
            return None

    def with_hardware(self, name: str, gpu: Change, fabric: Change) -> ChangeEffect:
        """What other figures of the GPU and the fabric do. No change of a plan says them where it
        is calibrated.
        """
        here, constants = with_calibration(self.resolved)
        machine = {
            "gpu": here.gpu.model_copy(update=gpu),
            "fabric": here.fabric.model_copy(update=fabric),
        }
        faster = here.model_copy(update={"cluster": here.cluster.model_copy(update=machine)})
        written = {f"cluster.{field}": figure.model_dump() for field, figure in machine.items()}
        changes = {} if self.resolved.cluster.calibration else {**self.pinned_fields, **written}
        if changes:  # what a multiprocessor's rate decides
            constants = with_calibration(faster)[1]
        return ChangeEffect(
            name, changes, self.figures, _calibrated_figures(faster, constants, self.figures.risk)
        )


def explained_plan(
    plan: Plan, profile: Profile | None = None, risk: float = USUAL_RISK
) -> ExplainedPlan:
    """The subject of questions about `plan`; `profile` is its estimate where there is one. Raises
    `PlanError`.
    """
    check_risk(risk)
    full = plan.resolve()
    figures = plan_figures(full, risk)
    return ExplainedPlan(plan, full, figures, _pinned_fields(plan, full), profile)


def plan_figures(full: ResolvedPlan, risk: float = USUAL_RISK) -> PlanFigures:
    """The estimate of a complete plan in short, without its frames and advice. Raises
    `PlanError`.
    """
    return _calibrated_figures(*with_calibration(full), risk)


def _calibrated_figures(full: ResolvedPlan, constants: Constants, risk: float) -> PlanFigures:
    w = planned_workload(full)
    memory = beside_capacity(peak_memory(w, constants), full)
    return PlanFigures(
        seconds=float(step_time(w, constants).seconds),
        tokens=float(full.training.global_batch * full.training.sequence_length),
        peak_bytes=memory.peak_bytes,
        capacity_bytes=memory.capacity_bytes,
        gpus=full.world_size,
        exceeds_host=memory.exceeds_host,
        runs_out=memory.runs_out,
        risk=risk,
    )


def device_bytes_by_rank(profile: Profile, moment: str) -> dict[int, float]:
    """Device bytes at `moment`, all categories together, of each rank that has rows."""
    sums: dict[int, float] = {}
    for rank, size in profile.rows("memory", "rank", "bytes", moment=moment, tier="device"):
        sums[int(rank)] = sums.get(int(rank), 0.0) + float(size)
    return sums


def _pinned_fields(plan: Plan, full: Plan) -> Change:
    rules = with_preset(plan.strategy)
    axes = [
        axis for axis in ("tensor", "pipeline", "context", "expert") if _set_by_rule(rules, axis)
    ]
    pins: Change = {f"strategy.{axis}.size": getattr(full.strategy, axis).size for axis in axes}
    if "global_batch" not in plan.training.model_fields_set:
        pins["training.global_batch"] = full.training.global_batch
    return pins


def _set_by_rule(strategy: dict[str, Any], axis: str) -> bool:
    return isinstance(strategy.get(axis, {}).get("size"), str)
