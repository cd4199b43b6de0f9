"""The planner's panel: one widget with every control, each a view of the plan, and the words beside
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
from workbench.lab.panel.control_values import offers, origin, text_of, values, with_value
from workbench.lab.panel.edit_history import Intent
from workbench.lab.panel.plan_controls import Knob, knobs
from workbench.plan.resolved_plan import ResolvedPlan

HERE = Path(__file__).parent


class Panel(anywidget.AnyWidget):
    """The controls on the page. `on_message(content)` is called with what a person does there."""

    _esm = HERE / "js" / "panel.js"
    _css = HERE / "js" / "panel.css"

    groups: Any = traitlets.List().tag(sync=True)
    """Title and fields (name, label, form, hint, options) of every group, in order."""
    shown: Any = traitlets.Dict().tag(sync=True)
    """What every control shows (`fields`), whether there is a way back, the file's name, and
    `heard`.
    """

    def __init__(self, on_message: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(
            groups=groups(),
            shown={"heard": 0, "fields": {}, "undo": False, "reset": False, "path": ""},
        )
        self._on_message = on_message
        self.on_msg(self._heard)

    def show(self, **shown: Any) -> None:
        """Change some of what is shown."""
        self.shown = {**self.shown, **shown}

    def _heard(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        try:
            self._on_message(content)
        finally:  # the page shows nothing of us while it waits for an answer
            self.show(heard=max(int(content.get("number", 0)), self.shown["heard"]))


def groups() -> list[dict[str, Any]]:
    """The declaration of all controls."""
    titles = dict.fromkeys(knob.group for knob in knobs().values())
    return [
        {"title": title, "fields": [_field(k) for k in knobs().values() if k.group == title]}
        for title in titles
    ]


def _field(knob: Knob) -> dict[str, Any]:
    options = [list(choice) for choice in knob.choices]
    return {
        "name": knob.name,
        "label": knob.label,
        "form": knob.form,
        "hint": knob.hint,
        "options": options,
    }


def fields(
    intent: Intent, full: ResolvedPlan | None, problems: Sequence[Problem]
) -> dict[str, dict[str, Any]]:
    """What each control shows for what is asked; `full` is the last legal plan, complete."""
    shown, legal = values(intent.plan, full), offers(full) if full else {}
    said = beside(problems)
    found = {}
    for name, knob in knobs().items():
        value = shown[name]
        cell: dict[str, Any] = {
            "value": value,
            "text": text_of(value),
            "origin": origin(intent.plan, knob),
        }
        if name in intent.rejected:
            cell |= {"text": str(intent.rejected[name].typed), "origin": ""}
        offered = (
            with_value(legal.get(name, knob.choices), value)
            if knob.form in ("choice", "size")
            else ()
        )
        if offered != knob.choices:
            cell["options"] = [list(choice) for choice in offered]
        found[name] = cell | {"problem": "; ".join(said.get(name, []))}
    return found


def beside(problems: Sequence[Problem]) -> Mapping[str, list[str]]:
    """Control -> what is wrong with it."""
    said: dict[str, list[str]] = {}
    for problem in problems:
        if knob := about(problem):
            said.setdefault(knob.name, []).append(problem.message)
    return said


def about(problem: Problem) -> Knob | None:
    """The control that a problem is about, if there is one."""
    return next(
        (knob for knob in knobs().values() if f"{problem.field}.".startswith(f"{knob.path}.")), None
    )
