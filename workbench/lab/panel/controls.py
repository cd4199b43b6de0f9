"""The planner's panel: one widget with every control, each a view of the plan, and the text beside
it.

The page sends what a person does as messages and never as state, so that nothing the page shows,
early or late, is taken for an edit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from workbench.errors import Problem
from workbench.lab.panel.control_values import (
    control_values,
    legal_choices,
    value_text,
    with_choice,
)
from workbench.lab.panel.edit_history import RequestedPlan
from workbench.lab.panel.plan_controls import PlanControl, panel_path, plan_controls
from workbench.plan.resolved_plan import ResolvedPlan

HERE = Path(__file__).parent


class Panel(anywidget.AnyWidget):
    """The controls on the page. `on_message(content)` is called with what a person does there."""

    _esm = HERE / "js" / "panel.js"
    _css = HERE / "js" / "panel.css"

    groups: Any = traitlets.List().tag(sync=True)
    """Title and fields (name, label, form, hint, options) of every group, in order."""
    shown: Any = traitlets.Dict().tag(sync=True)
    """`fields` (what every control shows), `undo` and `reset` (whether they are enabled), `path` of
    the plan file, and `acknowledged`: the number of the last message that was answered.
    """

    def __init__(self, on_message: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(
            groups=control_groups(),
            shown={"acknowledged": 0, "fields": {}, "undo": False, "reset": False, "path": ""},
        )
        self._on_message = on_message
        self.on_msg(self._receive)

    def show(self, **shown: Any) -> None:
        """Change some of what is shown."""
        self.shown = {**self.shown, **shown}

    def _receive(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        try:
            self._on_message(content)
        finally:  # the page ignores updates until its message is acknowledged
            self.show(acknowledged=max(int(content.get("number", 0)), self.shown["acknowledged"]))


def control_groups() -> list[dict[str, Any]]:
    """The declaration of all controls."""
    titles = dict.fromkeys(control.group for control in plan_controls().values())
    return [
        {
            "title": title,
            "fields": [_field(k) for k in plan_controls().values() if k.group == title],
        }
        for title in titles
    ]


def _field(control: PlanControl) -> dict[str, Any]:
    options = [list(choice) for choice in control.choices]
    return {
        "name": control.name,
        "label": control.label,
        "form": control.form,
        "hint": control.hint,
        "options": options,
    }


def control_fields(
    requested: RequestedPlan, resolved: ResolvedPlan | None, problems: Sequence[Problem]
) -> dict[str, dict[str, Any]]:
    """What each control shows.

    Args:
        requested: The plan as written, and rejected input.
        resolved: The last legal plan; None where there has been none.
        problems: What is illegal in `requested`.

    Returns:
        Control name -> value, text, origin, problem, and options where they depend on the plan.
    """
    shown, legal = (
        control_values(requested.plan, resolved),
        legal_choices(resolved) if resolved else {},
    )
    messages = problems_by_control(problems)
    found = {}
    for name, control in plan_controls().items():
        value = shown[name]
        cell: dict[str, Any] = {
            "value": value,
            "text": value_text(value),
            "origin": requested.origin(control),
        }
        if name in requested.rejected:
            cell |= {"text": str(requested.rejected[name].typed), "origin": ""}
        offered = (
            with_choice(legal.get(name, control.choices), value)
            if control.form in ("choice", "size")
            else ()
        )
        if offered != control.choices:
            cell["options"] = [list(choice) for choice in offered]
        found[name] = cell | {"problem": "; ".join(messages.get(name, []))}
    return found


def problems_by_control(problems: Sequence[Problem]) -> Mapping[str, list[str]]:
    """Control name -> messages of its problems."""
    messages: dict[str, list[str]] = {}
    for problem in problems:
        if control := control_of(problem):
            messages.setdefault(control.name, []).append(problem.message)
    return messages


def control_of(problem: Problem) -> PlanControl | None:
    """The control that a problem is about, if there is one; of a section's, its first."""
    path, every = panel_path(problem.field), plan_controls().values()
    own = (control for control in every if f"{path}.".startswith(f"{control.path}."))
    of_section = (control for control in every if control.path.startswith(f"{path}."))
    return next(own, next(of_section, None) if "." in path else None)
