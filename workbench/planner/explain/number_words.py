"""Numbers as a sentence says them, and tables as a notebook shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workbench.untrusted_text import escaped

ROUNDING = 1e-9
"""Relative difference of two estimates that comes of arithmetic alone."""


def gib(size: float) -> str:
    """Bytes: 26224136806 -> '24.4 GiB'."""
    if abs(size) < 2**20:
        return "0"
    return f"{size / 2**30:,.1f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:.0f} MiB"


def seconds(value: float) -> str:
    """Seconds: 0.0123 -> '12.3 ms'."""
    if value < 1e-6:
        return "0"
    return (
        f"{value:,.0f} s"
        if value >= 100
        else f"{value:.3g} s"
        if value >= 1
        else f"{1e3 * value:.3g} ms"
    )


def percent(share: float) -> str:
    """A share: 0.1234 -> '12 %', 0.0123 -> '1.2 %'."""
    return f"{100 * share:.0f} %" if abs(share) >= 0.0995 else f"{100 * share:.1f} %"


def of(share: float) -> str:
    """A share before what it is of: 0.1234 -> '12 % of', 4.93 -> '4.9 times'."""
    return f"{percent(share)} of" if share < 2 else f"{share:,.1f} times"


def count(number: float) -> str:
    """A count: 160605224960 -> '161 G'."""
    for name, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:,.0f}"


def days(number: float) -> str:
    """Days: 3.34 -> '3.34 days', 1480 -> '1,480 days', 0.01 -> '14.4 minutes'."""
    if number < 1 / 24:
        return f"{1440 * number:.3g} minutes"
    if number < 1:
        return f"{24 * number:.3g} hours"
    return f"{number:,.0f} days" if number >= 100 else f"{number:.3g} days"


def signed(value: float, told: str) -> str:
    """`told`, which says the absolute `value`, with its sign; '0' stays."""
    return told if told == "0" else f"{'+' if value >= 0 else '-'}{told}"


def html_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table under its title; all text is escaped."""
    head = "".join(f"<th>{escaped(name)}</th>" for name in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><caption>{escaped(title)}</caption><tr>{head}</tr>{body}</table>"
