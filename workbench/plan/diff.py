"""What two plans disagree about."""

from __future__ import annotations

from typing import Any

from workbench.plan.schema import Plan
from workbench.plan.source import plain


def diff(a: Plan, b: Plan) -> list[tuple[str, Any, Any]]:
    """(dotted field, value in `a`, value in `b`) of every field that differs; None where a field is absent.

    Compares plans as they are: complete both first to compare what they mean.
    """
    left, right = _flat(plain(a)), _flat(plain(b))
    fields = list(dict.fromkeys([*left, *right]))
    return [(field, left.get(field), right.get(field)) for field in fields if left.get(field) != right.get(field)]


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            rows |= _flat(value, f"{prefix}{key}.")
        else:
            rows[f"{prefix}{key}"] = value
    return rows
