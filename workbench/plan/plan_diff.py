"""What two plans disagree about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.plan.schema import Plan, written_fields


def diff(a: Plan, b: Plan) -> list[tuple[str, Any, Any]]:
    """(dotted field, value in `a`, value in `b`) of every field that differs; None where a field is
    absent.

    Compares plans as they are: complete both first to compare what they mean.
    """
    left, right = _flat(written_fields(a)), _flat(written_fields(b))
    fields = list(dict.fromkeys([*left, *right]))
    return [
        (field, left.get(field), right.get(field))
        for field in fields
        if left.get(field) != right.get(field)
    ]


NAMED = ("model", "cluster.gpu", "cluster.fabric")
"""Fields of a complete plan whose name stands for all that is below them."""


def differing(plans: Sequence[Plan]) -> dict[str, list[Any]]:
    """Dotted field -> its value in each of the complete `plans`, of the fields in which they are
    not all equal.

    Of models, GPUs and fabrics the figures that follow from their names are left out, and a plan's
    own name is no field to compare. None where a field is absent.
    """
    sides = [_flat(written_fields(plan)) for plan in plans]
    fields = dict.fromkeys(field for side in sides for field in side if field != "name")
    values = {field: [side.get(field) for side in sides] for field in fields}
    found = {field: each for field, each in values.items() if any(one != each[0] for one in each)}
    for name in (f"{field}.name" for field in NAMED if f"{field}.name" in found):
        below = [
            field
            for field in found
            if field.startswith(name.removesuffix("name")) and field != name
        ]
        for field in below:
            if _follows(found[field], found[name]):
                del found[field]
    return found


def _follows(values: Sequence[Any], names: Sequence[Any]) -> bool:
    """Whether plans of one name have one value."""
    return len({repr(pair) for pair in zip(names, values)}) == len(set(names))


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            rows |= _flat(value, f"{prefix}{key}.")
        else:
            rows[f"{prefix}{key}"] = value
    return rows
