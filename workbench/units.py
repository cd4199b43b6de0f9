"""Units and formatted numbers: three digits for tables and screens, fewer words for sentences.

`bytes_text`, `seconds_text` and `count_text` choose the unit by size and keep three digits.
`gib_text`, `duration_text`, `dollars_text` and the rest round as the sentences of `explain` and
`search` do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

GIB = 2**30
"""Bytes of a GiB."""
BYTE_UNITS = (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
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


def interval_text(ends: tuple[float, float]) -> str:
    """Both ends of an interval of seconds: (1.5, 2) -> '1.5 s to 2 s'."""
    return " to ".join(map(seconds_text, ends))


def loss_text(value: float | None, places: int = 4) -> str:
    """A loss; None and NaN are of a step whose loss was not finite."""
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.{places}f}"


def count_text(value: float | None) -> str:
    """A count for people: 12345678 -> '12.3 M', 161e9 -> '161 B'."""
    if value is None or not math.isfinite(value):
        return "–"
    for name, size in ((" T", 1e12), (" B", 1e9), (" M", 1e6), (" k", 1e4)):
        if value >= size:
            return f"{digits(value / (1e3 if name == ' k' else size))}{name}"
    return digits(value)


def flops_text(value: float) -> str:
    """Operations for people: 12345678900 -> '12.3 G'."""
    return count_text(value).replace(" B", " G")


def counted(number: int, noun: str) -> str:
    """A number of things: (1, 'layer') -> '1 layer', (2, 'batch') -> '2 batches'."""
    many = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else many}"


def gib_text(size: float) -> str:
    """Bytes with one decimal of a GiB, whole MiB below: 26224136806 -> '24.4 GiB'; '0' under a
    MiB.
    """
    if abs(size) < 2**20:
        return "0"
    return f"{size / GIB:,.1f} GiB" if abs(size) >= GIB else f"{size / 2**20:.0f} MiB"


def duration_text(value: float) -> str:
    """Seconds of a step with three digits: 0.0123 -> '12.3 ms'."""
    if value < 1e-6:
        return "0"
    return (
        f"{value:,.0f} s"
        if value >= 100
        else f"{value:.3g} s"
        if value >= 1
        else f"{1e3 * value:.3g} ms"
    )


def percent_text(share: float) -> str:
    """A share: 0.1234 -> '12 %', 0.0123 -> '1.2 %'."""
    return f"{100 * share:.0f} %" if abs(share) >= 0.0995 else f"{100 * share:.1f} %"


def risk_text(probability: float) -> str:
    """Probability of running out of memory: 0.0123 -> '1.2 %', 0.0004 -> '< 0.1 %', 0.9996 -> '>
    99.9 %'.
    """
    if probability < 0.001:
        return "< 0.1 %"
    return percent_text(probability) if probability <= 0.999 else "> 99.9 %"


def share_of_text(share: float) -> str:
    """A share as it stands before its whole: 0.1234 -> '12 % of', 4.93 -> '4.9 times'."""
    return f"{percent_text(share)} of" if share < 2 else f"{share:,.1f} times"


def quantity_text(number: float) -> str:
    """A quantity with three digits: 160605224960 -> '161 B'."""
    for name, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:,.0f}"


def days_text(number: float) -> str:
    """Days: 3.34 -> '3.34 days', 1480 -> '1,480 days', 0.01 -> '14.4 minutes', 2e-5 -> '1.73
    seconds'; `duration_text` below a second.
    """
    if number < 1 / 86400:
        return duration_text(86400 * number)
    units = (("days", 1.0), ("hours", 24.0), ("minutes", 1440.0), ("seconds", 86400.0))
    name, each = next((name, each) for name, each in units if each * number >= 1)
    return f"{number:,.0f} days" if number >= 100 else f"{each * number:.3g} {name}"


def dollars_text(amount: float) -> str:
    """Money: 14251.3 -> '$14,251', 9.078 -> '$9.08', 0.512 -> '$0.51', 0.004 -> '<$0.01'."""
    if 0 < amount < 0.01:
        return "<$0.01"
    if 0 < amount < 1:
        return f"${amount:.2f}"
    return f"${amount:,.0f}" if amount >= 99.95 else f"${digits(amount)}"


def signed_text(value: float, magnitude: str) -> str:
    """`magnitude`, the text of the absolute `value`, with its sign; '0' stays."""
    return magnitude if magnitude == "0" else f"{'+' if value >= 0 else '-'}{magnitude}"
