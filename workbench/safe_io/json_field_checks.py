"""What may stand in a field of a file that somebody else may have written: small predicates on
JSON's values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]

LARGEST = 2**53
"""Whole numbers of a record are below this: a chart and a frame hold them as float64 without loss.
"""


def whole(value: Any) -> bool:
    """A count, or an index."""
    return type(value) is int and 0 <= value < LARGEST


def number(value: Any) -> bool:
    """Any number that JSON knows, which is finite."""
    return type(value) in (int, float) and -LARGEST < value < LARGEST


def text(value: Any) -> bool:
    """A string."""
    return type(value) is str


def flag(value: Any) -> bool:
    """True or false."""
    return type(value) is bool


def object_(value: Any) -> bool:
    """An object of JSON."""
    return type(value) is dict


def one_of(*words: str) -> Check:
    """One of `words`."""
    known = frozenset(words)
    return lambda value: type(value) is str and value in known


def or_null(check: Check) -> Check:
    """What `check` accepts, or null: not known."""
    return lambda value: value is None or check(value)


def rows(fields: Mapping[str, Check]) -> Check:
    """A list of objects with these fields; null stands for an empty one."""
    return or_null(list_of(lambda row: has(row, fields)))


def has(item: Any, fields: Mapping[str, Check]) -> bool:
    """Whether `item` is an object and every field holds what may stand in it; one that is absent
    counts as null.
    """
    if type(item) is not dict:
        return False
    get = item.get
    for name, check in fields.items():  # noqa: SIM110 -- `all` over a generator reads a long run a sixth slower
        if not check(get(name)):
            return False
    return True


def list_of(check: Check) -> Check:
    """A list of what `check` accepts."""
    return lambda value: type(value) is list and all(map(check, value))
