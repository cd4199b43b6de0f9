"""Measurement loop of one rank: visit all points in turn until the time is over.

Points are interleaved, so that a burst of other work disturbs one visit of many points instead of
all visits of one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from workbench.engine.calibrate.call_stamps import seconds_added
from workbench.engine.calibrate.collective_points import collective_points
from workbench.engine.calibrate.local_points import Point, local_points
from workbench.engine.calibrate.measured_sizes import CalibrationSurvey
from workbench.engine.calibrate.operator_points import operator_points
from workbench.engine.calibrate.timing import Stopwatch
from workbench.engine.calibrate.whole_steps import step_points

MOST_CALLS = 256
Progress = Callable[[float], None]


@dataclass(frozen=True)
class PointSample:
    """Seconds of one call of a point, one entry per visit."""

    section: str
    labels: dict[str, Any]
    how: str
    seconds: list[float]


LEAST_SECONDS = 1e-6
"""Lower bound of a collective, whose time is a difference of two."""


def measure_points(
    rank: int,
    survey: CalibrationSurvey,
    device_type: str,
    threads: int,
    crowded: bool,
    seconds: float,
    every: bool,
    progress: Progress,
) -> list[PointSample]:
    """Measure all points on this rank.

    Args:
        rank: This rank.
        survey: The points.
        device_type: cpu or cuda.
        threads: Threads of this rank.
        crowded: Ranks share cores: only collectives are measured.
        seconds: About how long to measure.
        every: Visit each point at least once, however long it takes.
        progress: Called with the seconds elapsed.

    Returns:
        A sample per point visited.
    """
    begin = time.monotonic()
    torch.set_num_threads(threads)
    device = _device(device_type, rank)
    watches = _watches(device, threads)
    # Ranks that share a core would time the operating system's scheduler.
    own = (
        []
        if crowded
        else [*local_points(survey, device), *step_points(survey, device), *operator_points(survey)]
    )
    points = [*own, *collective_points(survey, device)]
    calls = [
        _calls_per_visit(point, watches[point.how], survey.window_of(point.how)) for point in points
    ]
    found: list[list[float]] = [[] for _ in points]
    for rounds in itertools.count():
        for point, often, seen in zip(points, calls, found):
            over = time.monotonic() - begin > seconds and (not every or rounds > 0)
            if _time_is_over(over):
                return [
                    PointSample(p.section, p.labels, p.how, s) for p, s in zip(points, found) if s
                ]
            if often:
                seen.append(_visit(point, watches[point.how], often, survey.window_of(point.how)))
        if rank == 0:
            progress(time.monotonic() - begin)
    raise AssertionError("a count has no end")


def _watches(device: torch.device, threads: int) -> dict[str, Stopwatch]:
    """The clock of each kind of point: CPU time for points that wait for no other rank."""
    wall, own = Stopwatch(device), Stopwatch(device, time.process_time)
    return {"together": wall, "alone": own if threads == 1 else wall, "host": own}


def _visit(point: Point, watch: Stopwatch, calls: int, window: float) -> float:
    """Seconds of one call."""
    if point.how == "together":
        return _seconds_between_work(point, watch, calls)
    undisturbed = point.how == "host" and dist.get_world_size() == 1
    return (watch.quickest if undisturbed else watch.window)(point.call, window) / point.repeats


def _seconds_between_work(point: Point, watch: Stopwatch, calls: int) -> float:
    """Mean seconds that one call adds to the work between two."""
    if point.between is None:
        return watch.of(point.call, calls) / calls
    return max(float(seconds_added(point.between, point.call, calls).mean()), LEAST_SECONDS)


def _device(device_type: str, rank: int) -> torch.device:
    if device_type != "cuda":
        return torch.device(device_type)
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _calls_per_visit(point: Point, watch: Stopwatch, window: float) -> int:
    """Warm up; returns calls per visit, agreed by all ranks: 0 where the backend lacks the
    point.
    """
    try:
        point.call()
        watch.of(point.call, 1)
        seconds = watch.of(point.call, 1)
    except (RuntimeError, ValueError, NotImplementedError):
        seconds = float("inf")
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return (
        0 if slowest.isinf() else max(1, min(MOST_CALLS, int(window / max(slowest.item(), 1e-7))))
    )


def _time_is_over(over: bool) -> bool:
    """Whether rank 0's time is over; the all-reduce also starts all ranks' visits together."""
    word = torch.tensor([float(over and dist.get_rank() == 0)])
    dist.all_reduce(word)
    return bool(word.item())
