"""Cases of long tests that continuous integration runs: of a test marked `drawn(count)`, so many
of its slow cases; `make sweep` runs the others.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest

KINDS = frozenset({"drawn", "slow", "sweep"})
"""Marks that say whether a case is drawn or left."""


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
    for name, cases in _slow_cases(items).items():
        kept = drawn_cases([_values(case) for case in cases], _count(cases[0]), seed=name)
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker(pytest.mark.sweep)


def _slow_cases(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Function]]:
    """By test: its cases that `make test-slow` would run."""
    found: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        marked = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and marked & KINDS == KINDS - {"sweep"}:
            found[item.nodeid.partition("[")[0]].append(item)
    return found


def _count(case: pytest.Item) -> int:
    """How many cases are drawn of the test that this is a case of."""
    mark = case.get_closest_marker("drawn")
    assert mark is not None
    return int(mark.args[0])


def _values(case: pytest.Function) -> frozenset[str]:
    """The case's parameters, each with its value."""
    return frozenset(f"{name}={value!r}" for name, value in case.callspec.params.items())
