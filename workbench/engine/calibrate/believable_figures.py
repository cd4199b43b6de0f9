"""Filters of measured points: outliers that do not repeat, or exceed the memory's bandwidth."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from workbench.machine.calibration_file import Conditions, Doubt
from workbench.units import GIB

Key = tuple[str, tuple[tuple[str, Any], ...]]

MAX_RELATIVE_IQR = 0.2
"""Interquartile range over the median, above which a point is unsteady."""
MIN_REPEATS = 4
"""Repeats below which the interquartile range is not evaluated."""
FLOOR_SECONDS = 1.05e-6
"""A collective this short is noise: the difference of two nearly equal times."""
SECTIONS = ("gemm", "memory", "attention", "collectives", "host_optimizer")


def relative_iqr(repeats: Sequence[float]) -> float:
    """Interquartile range over the median; 0 below `MIN_REPEATS` repeats."""
    if len(repeats) < MIN_REPEATS:
        return 0.0
    low, middle, high = np.quantile(repeats, (0.25, 0.5, 0.75))
    return float((high - low) / middle)


def memory_rate(figures: Mapping[Key, float]) -> float:
    """Bytes/s of the fastest stream among `figures`; infinite without streams."""
    rates = [
        dict(labels)["bytes"] / seconds
        for (name, labels), seconds in figures.items()
        if name == "memory"
    ]
    return max(rates, default=float("inf"))


def find_doubts(
    figures: Mapping[Key, float], repeats: Mapping[Key, Sequence[float]], ranks: int, memory: float
) -> list[Doubt]:
    """Doubts about the points that a world of `ranks` has measured.

    A collective is refused if it took no measurable time or exceeded one rank's memory bandwidth. A
    point is unsteady if its repeats scatter, or if a larger message was faster.

    Args:
        figures: Point -> seconds.
        repeats: Point -> seconds of each visit.
        ranks: World size of the measurement.
        memory: Memory bandwidth of one rank, bytes/s.

    Returns:
        A doubt per point concerned.
    """
    found = []
    quicker = _undercut({key: s for key, s in figures.items() if key[0] == "collectives"})
    for key, seconds in figures.items():
        if key[0] not in SECTIONS:
            continue
        refused = _impossible(key, seconds, memory)
        spread = max(relative_iqr(repeats.get(key, ())), quicker.get(key, 0.0))
        if refused or spread > MAX_RELATIVE_IQR:
            why = refused or f"unsteady: {spread:.0%}"
            found.append(
                Doubt(
                    section=key[0],
                    point=_point_label(key),
                    ranks=ranks,
                    why=why,
                    refused=bool(refused),
                )
            )
    return found


def refused_points(found: Iterable[Doubt]) -> set[tuple[str, int]]:
    """(point, ranks) of the refused points."""
    return {(doubt.point, doubt.ranks) for doubt in found if doubt.refused}


def believable(
    figures: Mapping[Key, float], found: Iterable[Doubt], ranks: int
) -> dict[Key, float]:
    """The figures without the refused points."""
    out = refused_points(found)
    return {
        key: seconds for key, seconds in figures.items() if (_point_label(key), ranks) not in out
    }


def conditions() -> Conditions:
    """Load and free memory of this machine now."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    return Conditions(
        load_average=round(load, 2), cpus=os.cpu_count() or 1, free_memory_gib=round(free, 2)
    )


def _impossible(key: Key, seconds: float, memory: float) -> str:
    if key[0] != "collectives":
        return ""
    if seconds <= FLOOR_SECONDS:
        return "took no measurable time"
    labels = dict(key[1])
    rate = (
        labels["bytes"] / seconds * (2 if labels["kind"] == "send" else 1)
    )  # a send was timed there and back
    return f"{rate / 1e9:,.0f} GB/s, memory carries {memory / 1e9:,.0f}" if rate > memory else ""


def _undercut(figures: Mapping[Key, float]) -> dict[Key, float]:
    """Point -> relative excess over a larger message of its kind; only where there is one."""
    found: dict[Key, float] = {}
    for one, other in combinations(figures, 2):
        (small, few), (large, many) = sorted(
            ((dict(key[1])["bytes"], figures[key]) for key in (one, other)),
            key=lambda pair: pair[0],
        )
        if _kind(one) == _kind(other) and small < large and few > many:
            excess = few / many - 1
            for key in (one, other):
                found[key] = max(found.get(key, 0.0), excess)
    return found


def _kind(key: Key) -> tuple[Any, ...]:
    return tuple(value for name, value in key[1] if name != "bytes")


def _point_label(key: Key) -> str:
    return f"{key[0]} " + ", ".join(f"{name} {value}" for name, value in key[1])
