"""From what is typed in a control to a value of the plan."""

from __future__ import annotations

import math
from typing import Any

from workbench.errors import PlanError, refuse
from workbench.lab.panel.plan_controls import Knob
from workbench.safe_io import yaml_files

AUTO = object()
"""The field is to be left out of the plan, which then fills it."""


def parse(knob: Knob, typed: Any) -> Any:
    """The value of `knob` that was typed or chosen; AUTO for an empty field. Raises `PlanError`
    naming the field.
    """
    if not isinstance(typed, str):
        return typed
    text = typed.strip()
    if not text and knob.form in ("number", "text"):
        if knob.required:
            raise refuse(knob.path, "is empty; legal: a whole number of at least 1")
        return AUTO
    if knob.form == "number":
        return _number(knob, text)
    return _structured(knob, text) if knob.name == "partition" else typed


def _number(knob: Knob, text: str) -> int | float:
    """'1e3' and '1,024' are numbers too."""
    try:
        value = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (knob.whole and value != int(value)):
        what = "a whole number" if knob.whole else "a number"
        raise refuse(knob.path, f"is '{text}'; legal: {what}, such as 8 or 1e3")
    return int(value) if knob.whole else value


def _structured(knob: Knob, text: str) -> Any:
    """Text as a plan file has it; a list may do without its brackets."""
    try:
        return yaml_files.parse(
            f"[{text}]" if "," in text and not text.startswith("[") else text, where=knob.path
        )
    except PlanError as error:
        raise refuse(
            knob.path, f"is '{text}', which cannot be read: {error.problems[0].message}"
        ) from None
