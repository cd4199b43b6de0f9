"""Operator strategies as a plan holds them: module pattern -> `((4,1),(1,1))`, MindSpore's form,
read strictly.

A tuple an input, a number of pieces a dimension. Ranks that a strategy leaves over repeat the
operator.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workbench.errors import refuse

Form = tuple[tuple[int, ...], ...]
"""A strategy in MindSpore's form: pieces of each dimension of each input."""
Placement = tuple[str | None, ...]
"""For each axis of a grid, outermost first, the dimension of an operator that it splits; None: it
repeats the work.
"""

_NUMBER = r"\s*[1-9][0-9]{0,8}\s*"
_INNER = rf"\s*\({_NUMBER}(?:,{_NUMBER})*,?\s*\)\s*"
_FORM = re.compile(rf"\s*\({_INNER}(?:,{_INNER})*,?\s*\)\s*")
LEGAL = "a tuple of tuples, one an input and a number of pieces a dimension, e.g. ((4,1),(1,1))"
LONGEST = 1000
"""Characters of a strategy."""


def parse_strategy(text: Any, field: str) -> Form:
    """The strategy that `text` means. Raises `PlanError` naming `field` and the legal form."""
    if not isinstance(text, str) or len(text) > LONGEST or not _FORM.fullmatch(text):
        raise refuse(field, f"is {_short(text)}; legal: {LEGAL}")
    inner = re.findall(r"\(([^()]*)\)", text)
    return tuple(
        tuple(int(number) for number in part.split(",") if number.strip()) for part in inner
    )


def _short(text: Any) -> str:
    said = repr(text)
    return said if len(said) <= 60 else f"{said[:57]}..."


def strategy_text(form: Form) -> str:
    """The strategy as text without spaces; a tuple of one keeps its comma, as in Python."""
    return _tuple(_tuple(map(str, part)) for part in form)


def _tuple(parts: Any) -> str:
    items = list(parts)
    return f"({','.join(items)}{',' if len(items) == 1 else ''})"


def read_strategies(operators: Mapping[str, Any]) -> dict[str, Form]:
    """Module pattern -> strategy, from a plan's `strategy.operators`. Raises `PlanError`."""
    return {
        pattern: parse_strategy(text, f"strategy.operators.{pattern}")
        for pattern, text in operators.items()
    }


def write_strategies(forms: Mapping[str, Form]) -> dict[str, str]:
    """Module pattern -> text, for a plan's `strategy.operators`."""
    return {pattern: strategy_text(form) for pattern, form in forms.items()}


def placed(first: str, pieces: Mapping[str, int], sizes: Sequence[int]) -> Placement:
    """The axes of prime `sizes` that take the pieces of each dimension: outermost for the dimension
    `first`, innermost for the others, the last first, so that equal forms lie alike.
    """
    placement: list[str | None] = [None] * len(sizes)
    for name in [name for name in pieces if name == first] + [
        name for name in reversed([*pieces]) if name != first
    ]:
        for prime in factors(pieces[name]):
            free = [a for a, size in enumerate(sizes) if size == prime and placement[a] is None]
            placement[free[0] if name == first else free[-1]] = name
    return tuple(placement)


def factors(number: int) -> list[int]:
    """Prime factors, smallest first: 12 -> [2, 2, 3]."""
    for prime in range(2, math.isqrt(number) + 1):
        if number % prime == 0:
            return [prime, *factors(number // prime)]
    return [number] if number > 1 else []


def strategy_grid(ranks: int, forms: Iterable[Form]) -> tuple[int, ...]:
    """Sides of the grid that `ranks` are seen as, outermost first, so that every form has its axes:
    all ranks in a row where no form asks for some of them, else the prime factors.
    """
    asked = {number for form in forms for part in form for number in part}
    return (ranks,) if asked <= {1, ranks} else tuple(factors(ranks))


def on_grid(first: str, pieces: Mapping[str, int], sides: Sequence[int]) -> Placement:
    """Where the pieces of each dimension lie on a grid of `strategy_grid`'s."""
    if len(sides) > 1:
        return placed(first, pieces, sides)
    return (next((name for name, number in pieces.items() if number > 1), None),)


def are_neighbors(axes: Sequence[int]) -> bool:
    """Whether axes, in ascending order, follow one another."""
    return not axes or axes[-1] - axes[0] == len(axes) - 1
