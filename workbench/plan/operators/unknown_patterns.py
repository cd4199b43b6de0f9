"""What is said of a pattern of `strategy.operators` that names no operator."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from fnmatch import fnmatchcase

from workbench.errors import Problem
from workbench.plan.operators.layer_patterns import layer_pattern

SHOWN = 20
"""Names that a refusal lists: all of a model of ours."""
NEAREST = 3


def unknown_pattern(pattern: str, names: Collection[str]) -> Problem:
    """The refusal of a pattern that matches none of `names`: which layers there are, if only its
    layer is wrong, else the nearest names, else all, those that differ in a number once.
    """
    what = "names no operator of the model"
    for part, numbers in enumerate(_numbers(pattern, names)):
        own = pattern.split(".")[part]
        if numbers and int(own) not in numbers:
            of = f"{layer_pattern(pattern)}, whose layers are {_as_ranges(numbers)}"
            return _problem(
                pattern, f"{what}: {own} is no layer of {of}; legal: one of those, or *"
            )
    known = [*dict.fromkeys(map(layer_pattern, names))]
    near = difflib.get_close_matches(layer_pattern(pattern), known, n=NEAREST, cutoff=0.7)
    if near:
        return _problem(pattern, f"{what}; did you mean {', '.join(near)}?")
    more = f", and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    return _problem(pattern, f"{what}; legal: {', '.join(known[:SHOWN])}{more}")


def _problem(pattern: str, message: str) -> Problem:
    return Problem(f"strategy.operators.{pattern}", message)


def _numbers(pattern: str, names: Collection[str]) -> list[set[int]]:
    """For each part of a pattern between dots that is a number, the numbers that names have there
    which match its other parts.
    """
    parts, wanted = pattern.split("."), layer_pattern(pattern)
    alike = [name.split(".") for name in names if fnmatchcase(name, wanted)]
    return [
        {int(name[at]) for name in alike if name[at : at + 1] and name[at].isdigit()}
        if part.isdigit()
        else set()
        for at, part in enumerate(parts)
    ]


def _as_ranges(numbers: set[int]) -> str:
    """0-3, 5"""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in found)
