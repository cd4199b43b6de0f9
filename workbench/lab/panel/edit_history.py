"""What a person has requested of a planner: the plan as written, rejected input, and undo.

The request is separate from what the controls show. A control is a view of the plan; only an edit
that a person sends changes what is requested.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.errors import PlanError, Problem
from workbench.lab.panel.control_values import applies, value_origin
from workbench.lab.panel.finetune_edits import TaskMemory
from workbench.lab.panel.plan_controls import PlanControl, panel_path, plan_controls
from workbench.lab.panel.plan_edits import HeldBatch
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.check import check
from workbench.plan.schema import Plan, written_fields

MAX_UNDO = 200
"""Requests stored for Undo."""


@dataclass(frozen=True)
class RejectedInput:
    """What was typed in a control that no plan can hold, and why."""

    typed: Any
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class RequestedPlan:
    """The plan as written at one time, the input that no plan can hold, and what comes back."""

    plan: Plan
    rejected: Mapping[str, RejectedInput] = field(default_factory=dict)
    """Control -> what is typed in it."""
    memory: TaskMemory = field(default_factory=TaskMemory)
    """What edits took out of the plan's fine-tuning."""
    held: HeldBatch | None = None
    """The global batch that edits stay at; None until one may change it, and where it was set."""

    def equals(self, other: RequestedPlan) -> bool:
        """Whether both ask for the same; a default that is written is not the same as one that is
        left out.
        """
        return (
            written_fields(self.plan) == written_fields(other.plan)
            and self.rejected == other.rejected
        )

    def resolve(self) -> ResolvedPlan:
        """The plan, resolved. Raises `PlanError` with every problem of the request; of a control in
        which something else is typed, what is typed.
        """
        rejected = [problem for found in self.rejected.values() for problem in found.problems]
        typed = tuple(f"{plan_controls()[name].path}." for name in self.rejected)
        others = (p for p in check(self.plan) if not f"{panel_path(p.field)}.".startswith(typed))
        if problems := [*rejected, *others]:
            raise PlanError(problems)
        return self.plan.resolve()

    def origin(self, control: PlanControl) -> str:
        """Who set a control, as `value_origin` says it; "held" for a global batch that nobody chose
        and that is written because its default is another now.
        """
        found = value_origin(self.plan, control)
        held = control.name == "global_batch" and self.held and not self.held.chosen
        return "held" if held and found == "" else found

    def with_plan(self, name: str, plan: Plan, held: HeldBatch | None = None) -> RequestedPlan:
        """With the plan that an edit of the control `name` made, which holds a global batch; what
        is typed in another that sets nothing of the plan any more goes.
        """
        rejected = {
            key: value
            for key, value in self.rejected.items()
            if key != name and (applies(plan, key) or not applies(self.plan, key))
        }
        return RequestedPlan(plan, rejected, self.memory.after(self.plan, plan), held)

    def with_rejected(self, name: str, rejected: RejectedInput) -> RequestedPlan:
        """With something typed in the control `name` that cannot be used."""
        return replace(self, rejected={**self.rejected, name: rejected})


class EditHistory:
    """The present request, those before it for Undo, and the plan that Reset goes back to."""

    def __init__(self, plan: Plan) -> None:
        self.start = plan
        self.now = RequestedPlan(plan)
        self._past: list[RequestedPlan] = []

    def push(self, requested: RequestedPlan) -> None:
        """Record a request; one that changes nothing is not recorded."""
        if not requested.equals(self.now):
            self._past = [*self._past[1 - MAX_UNDO :], self.now]
            self.now = requested

    def undo(self) -> None:
        """One step back; nothing where there is none."""
        if self._past:
            self.now = self._past.pop()

    def reset(self) -> None:
        """Back to the first plan, or the one last loaded; can be undone."""
        self.push(RequestedPlan(self.start))

    def load(self, plan: Plan) -> None:
        """Record a plan from a file; Reset goes back to it from now on. Can be undone."""
        self.start = plan
        self.push(RequestedPlan(plan))

    @property
    def can_undo(self) -> bool:
        """Whether there is a step back."""
        return bool(self._past)

    @property
    def can_reset(self) -> bool:
        """Whether the request differs from the first plan."""
        return not self.now.equals(RequestedPlan(self.start))
