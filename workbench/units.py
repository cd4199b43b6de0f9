"""Units chosen by size: what a person reads easily, and what goes into a title."""

from __future__ import annotations

import math
from collections.abc import Iterable

BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def byte_unit(values: Iterable[float]) -> tuple[str, int]:
    """The unit in which the largest of `values` (bytes) is at least 1, and its size in bytes."""
    largest = max((v for v in values if v == v), default=0)
    return next(((name, size) for name, size in BYTE_UNITS if largest >= size), ("MiB", 2**20))


def time_unit(values: Iterable[float]) -> tuple[str, float]:
    """The unit in which the largest of `values` (seconds) is at least 1, and its size in
    seconds.
    """
    largest = max((v for v in values if v == v), default=0)
    return next(((name, size) for name, size in TIME_UNITS if largest >= size), ("ms", 1e-3))


def digits(value: float, significant: int = 3) -> str:
    """`value` with about `significant` digits and no exponent: 1234 -> '1,234', 0.01234 ->
    '0.0123'.
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    places = max(0, significant - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def bytes_text(value: float) -> str:
    """Bytes for people: 62277025792 -> '58.0 GiB'."""
    name, size = byte_unit([value])
    return f"{digits(value / size)} {name}"


def seconds_text(value: float | None) -> str:
    """Seconds for people: 0.0123 -> '12.3 ms', 7 -> '7 s', 5400 -> '1 h 30 min'."""
    if value is None or not math.isfinite(value):
        return "–"
    if value >= 3600:
        return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"
    if value >= 120:
        return f"{int(value // 60)} min {int(value % 60)} s"
    if isinstance(value, int):
        return f"{value} s"
    name, size = time_unit([value])
    return f"{digits(value / size)} {name}"


def count_text(value: float | None) -> str:
    """A count for people: 12345678 -> '12.3 M'."""
    if value is None or not math.isfinite(value):
        return "–"
    for name, size in ((" T", 1e12), (" G", 1e9), (" M", 1e6), (" k", 1e4)):
        if value >= size:
            return f"{digits(value / (1e3 if name == ' k' else size))}{name}"
    return digits(value)
