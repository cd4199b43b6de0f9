"""Answers beside the recorded ones: keys may be added, nothing recorded may change or go."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

RELATIVE = 1e-9
"""Of two floats: sums of numpy may differ in the last bits from machine to machine."""


def differences(recorded: Any, now: Any, exact: bool = True, at: str = "") -> Iterator[str]:
    """Where `now` breaks what a reader of `recorded` relies on; with `exact` off only types and
    keys count.
    """
    if isinstance(recorded, dict):
        if not isinstance(now, dict):
            yield f"{at}: was an object, is {now!r}"
            return
        for key, value in recorded.items():
            if key not in now:
                yield f"{at}.{key}: is gone, was {value!r}"
            else:
                yield from differences(value, now[key], exact, f"{at}.{key}")
    elif isinstance(recorded, list):
        if not isinstance(now, list) or (exact and len(now) != len(recorded)):
            yield f"{at}: was a list of {len(recorded)}, is {now!r}"
            return
        for index, (one, other) in enumerate(zip(recorded, now)):
            yield from differences(one, other, exact, f"{at}[{index}]")
    elif not (_same(recorded, now) if exact else _alike(recorded, now)):
        yield f"{at}: was {recorded!r}, is {now!r}"


def _same(recorded: Any, now: Any) -> bool:
    if isinstance(recorded, float) and isinstance(now, int | float) and not isinstance(now, bool):
        return math.isclose(recorded, now, rel_tol=RELATIVE, abs_tol=1e-12)
    return type(recorded) is type(now) and recorded == now


def _alike(recorded: Any, now: Any) -> bool:
    """One JSON type; a number may be whole or not, and what can be null may be."""
    if recorded is None or now is None:
        return True
    number = (int, float)
    if isinstance(recorded, number) and not isinstance(recorded, bool):
        return isinstance(now, number) and not isinstance(now, bool)
    return type(recorded) is type(now)
