"""From what is typed in a control to a value of the plan."""

from __future__ import annotations

import math
from typing import Any

from workbench.errors import PlanError, refuse
from workbench.lab.panel.plan_controls import PlanControl
from workbench.safe_io import yaml_files

AUTO = object()
"""The field is to be left out of the plan, which then fills it."""


def parse_typed(control: PlanControl, typed: Any) -> Any:
    """The value of `control` that was typed or chosen; AUTO for an empty field. Raises `PlanError`
    naming the field.
    """
    if not isinstance(typed, str):
        return typed
    text = typed.strip()
    if not text and control.form in ("number", "text"):
        if control.required:
            raise refuse(control.path, "is empty; legal: a whole number of at least 1")
        return AUTO
    if control.form == "number":
        return _number(control, text)
    if control.name == "lora_targets":
        return _targets(text)
    if control.name == "partition":
        return _structured(control, text)
    return text if control.form == "text" else typed


def _number(control: PlanControl, text: str) -> int | float:
    """'1e3' and '1,024' are numbers too."""
    try:
        value = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (control.integral and value != int(value)):
        what = "a whole number" if control.integral else "a number"
        raise refuse(control.path, f"is '{text}'; legal: {what}, such as 8 or 1e3")
    return int(value) if control.integral else value


def _targets(text: str) -> str | list[str]:
    """Patterns by commas, or a name for several layers."""
    names = [name.strip() for name in text.split(",")]
    return text if text in ("all", "attention") else [name for name in names if name]


def _structured(control: PlanControl, text: str) -> Any:
    """Text as a plan file has it; a list may do without its brackets."""
    try:
        return yaml_files.parse(
            f"[{text}]" if "," in text and not text.startswith("[") else text, where=control.path
        )
    except PlanError as error:
        raise refuse(
            control.path, f"is '{text}', which cannot be read: {error.problems[0].message}"
        ) from None
