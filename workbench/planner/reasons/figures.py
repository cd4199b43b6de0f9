"""What a plan needs and how fast it is, in a few numbers, and what a change of it does to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.plan.errors import PlanError
from workbench.plan.resolve import with_preset
from workbench.plan.schema import Plan
from workbench.planner.estimate import estimate
from workbench.profile import Profile

Change = dict[str, Any]
"""Field -> value, as `Plan.replace` takes it."""
ROOM_GIB = 2.0**30
"""Memory of a card on which everything fits, so that an estimate does not look for advice each time."""


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
            "name": self.name, "changes": self.changes, "gpus": self.after.gpus, "fits": self.after.fits,
            "step_seconds": self.after.seconds, "seconds_change": self.seconds_change,
            "seconds_relative": self.after.seconds / self.before.seconds - 1,
            "peak_bytes": self.after.peak_bytes, "peak_change": self.peak_change,
            "peak_relative": self.after.peak_bytes / self.before.peak_bytes - 1, "speed": self.speed,
        }  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A plan, complete and estimated once; what is asked of it compares with this."""

    plan: Plan
    full: Plan
    profile: Profile
    figures: Figures
    pins: Change
    """What a preset's rule or a default would decide anew after a change: sizes of axes, the global batch."""

    def effect(self, name: str, change: Change) -> Effect | None:
        """What `change`, and nothing else, does; None where it is illegal or cannot be estimated."""
        changes = {**self.pins, **change}
        try:
            return Effect(name, changes, self.figures, figures(self.plan.replace(**changes)))
        except PlanError:
            return None


def subject(plan: Plan, profile: Profile | None = None) -> Subject:
    """The subject of questions about `plan`; `profile` is its estimate where there is one. Raises `PlanError`."""
    full = plan.complete()
    profile = profile or estimate(plan)
    return Subject(plan, full, profile, in_short(full, profile), _pins(plan, full))


def figures(plan: Plan) -> Figures:
    """The estimate of `plan` in short. Raises `PlanError` where it is illegal or cannot be estimated."""
    full = plan.complete()
    card = full.card.model_dump() | {"memory_gib": ROOM_GIB}
    roomy = plan.replace(**{"cluster.gpu": card, "cluster.fabric": full.fabric.model_dump()})
    return in_short(full, estimate(roomy))


def in_short(full: Plan, profile: Profile) -> Figures:
    """The figures of an estimate of the complete plan `full`."""
    return Figures(
        seconds=float(profile.steps.seconds.iloc[0]), tokens=float(profile.steps.tokens.iloc[0]),
        peak_bytes=round(max(stage_sums(profile, "peak"), default=0.0)),
        capacity_bytes=int(full.card.memory_gib * 2**30), gpus=full.world_size,
    )  # fmt: skip


def stage_sums(profile: Profile, moment: str) -> list[float]:
    """Device bytes of each pipeline rank at `moment`, all categories together."""
    rows = profile.memory
    here = (rows.moment.to_numpy() == moment) & (rows.tier.to_numpy() == "device")
    stages = rows.stage.to_numpy()[here].astype(int)
    sums: list[float] = np.bincount(stages, weights=rows.bytes.to_numpy()[here].astype(float)).tolist()
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
