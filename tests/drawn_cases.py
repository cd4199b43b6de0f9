"""Cases of long tests that continuous integration runs: of a test marked `drawn(count)`, so many
of its slow cases, or of all its cases where none is slow; `make sweep` runs the others.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest


def drawn_cases(values: Sequence[frozenset[str]], count: int, seed: str) -> set[int]:
    """Numbers of `count` cases with these parameters' values, drawn: each time one of those that
    have the most values that none before has.
    """
    order = random.Random(seed).sample(range(len(values)), len(values))
    seen: set[str] = set()
    kept: set[int] = set()
    while len(kept) < min(count, len(values)):
        left = (number for number in order if number not in kept)
        best = max(left, key=lambda number: len(values[number] - seen))
        kept.add(best)
        seen |= values[best]
    return kept


def leave_others_to_the_sweep(items: Iterable[pytest.Item]) -> None:
    """Marks `sweep` what is not drawn."""
    for name, cases in _cases_to_draw_of(items).items():
        kept = drawn_cases([_values(case) for case in cases], _count(cases[0]), seed=name)
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker(pytest.mark.sweep)


def _cases_to_draw_of(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Function]]:
    """By test: its slow cases, or all where none is slow."""
    found: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        marked = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and "drawn" in marked and "sweep" not in marked:
            found[item.nodeid.partition("[")[0]].append(item)
    return {name: _slow(cases) or cases for name, cases in found.items()}


def _slow(cases: Iterable[pytest.Function]) -> list[pytest.Function]:
    return [case for case in cases if case.get_closest_marker("slow")]


def _count(case: pytest.Item) -> int:
    """How many cases are drawn of the test that this is a case of."""
    mark = case.get_closest_marker("drawn")
    assert mark is not None
    return int(mark.args[0])


def _values(case: pytest.Function) -> frozenset[str]:
    """The case's parameters, each with its value."""
    return frozenset(f"{name}={value!r}" for name, value in case.callspec.params.items())
