"""Nested data with one thing in it changed at random: what a file may hold when a person is
wrong.
"""

import copy
from collections.abc import Iterator
from random import Random
from typing import Any


def paths(data: dict[str, Any], above: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Every key, as the keys that lead to it."""
    for key, value in data.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


def mutate(data: dict[Any, Any], pick: Random, values: list[Any]) -> None:
    """Put one of `values` anywhere, take a key out, or add one; `pick` is a `random.Random`."""
    *above, last = pick.choice(list(paths(data)))
    for key in above:
        data = data[key]
    kind = pick.random()
    if kind < 0.75:
        data[last] = copy.deepcopy(pick.choice(values))
    elif kind < 0.9:
        data.pop(last)
    else:
        data[pick.choice(["", "size", "zzz", f"{last}s", 3])] = 1
