"""Strategies as text: `((4,1),(1,1))`, read strictly, as `strategy.operators` of a plan holds them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from workbench.plan.errors import refuse
from workbench.planner.operators.operator import Form

_NUMBER = r"\s*[1-9][0-9]{0,8}\s*"
_INNER = rf"\s*\({_NUMBER}(?:,{_NUMBER})*,?\s*\)\s*"
_FORM = re.compile(rf"\s*\({_INNER}(?:,{_INNER})*,?\s*\)\s*")
LEGAL = "a tuple of tuples, one an input and a number of pieces a dimension, e.g. ((4,1),(1,1))"
LONGEST = 1000
"""Characters of a strategy."""


def parse(text: Any, field: str) -> Form:
    """The strategy that `text` means. Raises `PlanError` naming `field` and the legal form."""
    if not isinstance(text, str) or len(text) > LONGEST or not _FORM.fullmatch(text):
        raise refuse(field, f"is {_short(text)}; legal: {LEGAL}")
    inner = re.findall(r"\(([^()]*)\)", text)
    return tuple(tuple(int(number) for number in part.split(",") if number.strip()) for part in inner)


def _short(text: Any) -> str:
    said = repr(text)
    return said if len(said) <= 60 else f"{said[:57]}..."


def written(form: Form) -> str:
    """The strategy as text without spaces; a tuple of one keeps its comma, as in Python."""
    return _tuple(_tuple(map(str, part)) for part in form)


def _tuple(parts: Any) -> str:
    items = list(parts)
    return f"({','.join(items)}{',' if len(items) == 1 else ''})"


def read(operators: Mapping[str, Any]) -> dict[str, Form]:
    """Module pattern -> strategy, from a plan's `strategy.operators`. Raises `PlanError`."""
    return {pattern: parse(text, f"strategy.operators.{pattern}") for pattern, text in operators.items()}


def write(forms: Mapping[str, Form]) -> dict[str, str]:
    """Module pattern -> text, for a plan's `strategy.operators`."""
    return {pattern: written(form) for pattern, form in forms.items()}
