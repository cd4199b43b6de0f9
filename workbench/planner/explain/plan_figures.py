"""What a plan needs and how fast it is, in a few numbers, and what a change of it does to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.costmodel.inputs.rank_workload import workload
from workbench.costmodel.memory.peak_memory import peak_memory
from workbench.costmodel.rates.constants import Constants
from workbench.costmodel.step_time import step_time
from workbench.errors import PlanError
from workbench.plan.resolution import with_preset
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner.calibrated_plan import on_machine
from workbench.planner.estimate import estimate
from workbench.profile import Profile

Change = dict[str, Any]
"""Field -> value, as `Plan.replace` takes it."""


@dataclass(frozen=True)
class Figures:
    """An estimate in short. Bytes are of the fullest rank, tokens of the whole job in one step."""

    seconds: float
    tokens: float
    peak_bytes: int
    capacity_bytes: int
    gpus: int

    @property
    def fits(self) -> bool:
        """Whether the fullest rank is within its card."""
        return self.peak_bytes <= self.capacity_bytes

    @property
    def tokens_per_second(self) -> float:
        """Of the whole job."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Effect:
    """What one change of a plan does: `changes` is what `plan.replace` takes."""

    name: str
    changes: Change
    before: Figures
    after: Figures

    @property
    def seconds_change(self) -> float:
        """Seconds that a step takes longer; below zero where it is faster."""
        return self.after.seconds - self.before.seconds

    @property
    def peak_change(self) -> int:
        """Bytes more on the fullest rank; below zero where it is emptier."""
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
            "step_seconds": self.after.seconds,
            "seconds_change": self.seconds_change,
            "seconds_relative": self.after.seconds / self.before.seconds - 1,
            "peak_bytes": self.after.peak_bytes,
            "peak_change": self.peak_change,
            "peak_relative": self.after.peak_bytes / self.before.peak_bytes - 1,
            "speed": self.speed,
        }


@dataclass(frozen=True)
class Subject:
    """A plan, complete and estimated once; what is asked of it compares with this."""

    plan: Plan
    full: ResolvedPlan
    profile: Profile
    figures: Figures
    pins: Change
    """What a preset's rule or a default would decide anew after a change: sizes of axes, the global
    batch.
    """

    def effect(self, name: str, change: Change) -> Effect | None:
        """What `change`, and nothing else, does; None where it is illegal or cannot be
        estimated.
        """
        changes = {**self.pins, **change}
        try:
            return Effect(
                name, changes, self.figures, figures(self.plan.replace(**changes).resolve())
            )
        except PlanError:
            return None

    def with_hardware(self, name: str, card: Change, fabric: Change) -> Effect:
        """What other figures of the card and the fabric do. No change of a plan says them where it
        is calibrated.
        """
        here, constants = on_machine(self.full)
        machine = {
            "gpu": here.gpu.model_copy(update=card),
            "fabric": here.fabric.model_copy(update=fabric),
        }
        faster = here.model_copy(update={"cluster": here.cluster.model_copy(update=machine)})
        written = {f"cluster.{field}": figure.model_dump() for field, figure in machine.items()}
        changes = {} if self.full.cluster.calibration else {**self.pins, **written}
        return Effect(name, changes, self.figures, _figures(faster, constants))


def subject(plan: Plan, profile: Profile | None = None) -> Subject:
    """The subject of questions about `plan`; `profile` is its estimate where there is one. Raises
    `PlanError`.
    """
    full = plan.resolve()
    return Subject(plan, full, profile or estimate(plan), figures(full), _pins(plan, full))


def figures(full: ResolvedPlan) -> Figures:
    """The estimate of a complete plan in short, without its frames and advice. Raises
    `PlanError`.
    """
    return _figures(*on_machine(full))


def _figures(full: ResolvedPlan, constants: Constants) -> Figures:
    w = workload(full)
    return Figures(
        seconds=float(step_time(w, constants).seconds),
        tokens=float(full.training.global_batch * full.training.sequence_length),
        peak_bytes=round(float(peak_memory(w, constants).peak.max())),
        capacity_bytes=int(full.gpu.memory_gib * 2**30),
        gpus=full.world_size,
    )


def stage_sums(profile: Profile, moment: str) -> list[float]:
    """Device bytes of each pipeline rank at `moment`, all categories together."""
    rows = profile.memory
    here = (rows.moment.to_numpy() == moment) & (rows.tier.to_numpy() == "device")
    stages = rows.stage.to_numpy()[here].astype(int)
    sums: list[float] = np.bincount(
        stages, weights=rows.bytes.to_numpy()[here].astype(float)
    ).tolist()
    return sums


def _pins(plan: Plan, full: Plan) -> Change:
    rules = with_preset(plan.strategy)
    axes = [axis for axis in ("tensor", "pipeline", "context", "expert") if _is_rule(rules, axis)]
    pins: Change = {f"strategy.{axis}.size": getattr(full.strategy, axis).size for axis in axes}
    if "global_batch" not in plan.training.model_fields_set:
        pins["training.global_batch"] = full.training.global_batch
    return pins


def _is_rule(strategy: dict[str, Any], axis: str) -> bool:
    return isinstance(strategy.get(axis, {}).get("size"), str)
