"""What adapters, and a base in 4 bits, save of full fine-tuning under the same strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.costmodel.communication.collective_volume import exact_collectives, step_collectives
from workbench.errors import PlanError
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.explain.plan_figures import ExplainedPlan, PlanFigures, plan_figures
from workbench.planner.methods.finetune_methods import FULL, method_plan, method_words
from workbench.planner.methods.method_states import StateBytes, state_bytes
from workbench.planner.operator_plans.planned_workload import planned_workload
from workbench.units import duration_text, gib_text, share_of_text


@dataclass(frozen=True)
class MethodFigures:
    """What a plan takes under one method. Estimated; bytes are of the rank with the most."""

    states: StateBytes
    collective_bytes: float
    """That the rank's collectives and transfers carry in a step."""
    figures: PlanFigures


@dataclass(frozen=True)
class MethodSavings:
    """A plan that trains adapters beside the same with all weights trained."""

    words: str
    """Its method, for people."""
    own: MethodFigures
    full: MethodFigures

    @property
    def sentence(self) -> str:
        """Both figures of states, traffic and step."""
        own, full = self.own, self.full
        parts = ", ".join(
            f"{name} {_of(getattr(own.states, name), getattr(full.states, name))}"
            for name in StateBytes._fields
        )
        sent = ""
        if full.collective_bytes:
            sent = f"; a rank's messages a step {_of(own.collective_bytes, full.collective_bytes)}"
        step, longer = (duration_text(each.figures.seconds) for each in (own, full))
        return (
            f"Method: {self.words}, beside full fine-tuning: model states of a rank "
            f"{_of(own.states.total, full.states.total)} ({parts}){sent}; a step {step} of "
            f"{longer} (estimated).{self._fit}"
        )

    @property
    def _fit(self) -> str:
        """That full fine-tuning does not fit, where it does not."""
        full = self.full.figures
        if full.fits:
            return ""
        if full.peak_bytes <= full.capacity_bytes:
            return " Full fine-tuning does not fit: it offloads more than the host's memory."
        peak, capacity = gib_text(full.peak_bytes), gib_text(full.capacity_bytes)
        return f" Full fine-tuning does not fit: {peak} of a GPU's {capacity} (estimated)."

    def to_json(self) -> dict[str, Any]:
        """Both, for machines."""
        return {
            "method": self.words,
            **{name: _json(each) for name, each in (("own", self.own), ("full", self.full))},
        }


def method_savings(asked: ExplainedPlan) -> MethodSavings | None:
    """What the method of a plan saves; None where it trains all weights, or where no such plan
    with all weights trained is legal.
    """
    if asked.resolved.lora is None:
        return None
    try:
        full = method_plan(asked.plan.replace(**asked.pinned_fields), FULL).resolve()
        other = _method_figures(full, plan_figures(full, asked.figures.risk))
    except PlanError:
        return None
    own = _method_figures(asked.resolved, asked.figures)
    return MethodSavings(method_words(asked.plan), own, other)


def _method_figures(full: ResolvedPlan, figures: PlanFigures) -> MethodFigures:
    w = planned_workload(with_calibration(full)[0])
    calls = step_collectives(w)
    traffic = (
        sum(call.bytes * call.count for call in exact_collectives(w, calls, place))
        for place in range(len(w.places))
    )
    return MethodFigures(state_bytes(full), float(max(traffic)), figures)


def _of(own: float, full: float) -> str:
    """`1.2 GiB, 13 % of 9.3 GiB`."""
    return f"{gib_text(own)}, {share_of_text(own / full)} {gib_text(full)}"


def _json(one: MethodFigures) -> dict[str, Any]:
    return {
        "state_bytes": one.states._asdict(),
        "collective_bytes": one.collective_bytes,
        "step_seconds": one.figures.seconds,
        "peak_bytes": one.figures.peak_bytes,
    }
