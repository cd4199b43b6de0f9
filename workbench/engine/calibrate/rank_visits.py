"""What one rank does: visit every point again and again, in turn with the others, until the time is
over.

Points are interleaved, so that a neighbour's burst of work spoils one visit of many points, not all
visits of one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from workbench.engine.calibrate.collective_points import collective_points
from workbench.engine.calibrate.local_points import Point, local_points
from workbench.engine.calibrate.measured_sizes import CalibrationSurvey
from workbench.engine.calibrate.timing import Stopwatch
from workbench.engine.calibrate.whole_steps import step_points

MOST_CALLS = 256
Progress = Callable[[float], None]


@dataclass(frozen=True)
class PointSample:
    """Seconds of one call of one point: one entry a visit."""

    section: str
    labels: dict[str, Any]
    how: str
    seconds: list[float]


LEAST_SECONDS = 1e-6
"""No collective takes less; what a difference of two times may fall below."""


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
    """All points on this rank for about `seconds`; `progress` hears the seconds spent.

    `every`: each point is visited, however long it takes. `crowded`: ranks share cores, and only
    what they do together is measured.
    """
    begin = time.monotonic()
    torch.set_num_threads(threads)
    device = _device(device_type, rank)
    watches = _watches(device, threads)
    # What takes turns on a core takes as many times longer: nothing is learned from timing the
    # scheduler.
    own = [] if crowded else [*local_points(survey, device), *step_points(survey, device)]
    points = [*own, *collective_points(survey, device)]
    calls = [_prepared(point, watches[point.how], survey.window) for point in points]
    found: list[list[float]] = [[] for _ in points]
    for rounds in itertools.count():
        for point, often, seen in zip(points, calls, found):
            over = time.monotonic() - begin > seconds and (not every or rounds > 0)
            if _agreed(over):
                return [
                    PointSample(p.section, p.labels, p.how, s) for p, s in zip(points, found) if s
                ]
            if often:
                seen.append(_visit(point, watches[point.how], often, survey.window))
        if rank == 0:
            progress(time.monotonic() - begin)
    raise AssertionError("a count has no end")


def _watches(device: torch.device, threads: int) -> dict[str, Stopwatch]:
    """How each kind of point is timed: what waits for nobody by the time that it has a core."""
    wall, own = Stopwatch(device), Stopwatch(device, time.process_time)
    return {"together": wall, "alone": own if threads == 1 else wall, "host": own}


def _visit(point: Point, watch: Stopwatch, calls: int, window: float) -> float:
    """Seconds of one call."""
    if point.how == "together":
        return _alternating(point, watch, calls)
    undisturbed = point.how == "host" and dist.get_world_size() == 1
    return (watch.quickest if undisturbed else watch.window)(point.call, window)


def _alternating(point: Point, watch: Stopwatch, calls: int) -> float:
    """Seconds of one call, less those of the work between two calls."""
    between = point.between
    if between is None:
        return watch.of(point.call, calls) / calls

    def both() -> None:
        between()
        point.call()

    spent = watch.of(both, calls) - watch.of(between, calls)
    return max(spent / calls, LEAST_SECONDS)


def _device(device_type: str, rank: int) -> torch.device:
    if device_type != "cuda":
        return torch.device(device_type)
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _prepared(point: Point, watch: Stopwatch, window: float) -> int:
    """Warm up; how often a visit calls the point, agreed by all ranks. 0: this backend cannot do
    it.
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


def _agreed(over: bool) -> bool:
    """Whether rank 0 says that the time is over; also what lets all ranks start a visit
    together.
    """
    word = torch.tensor([float(over and dist.get_rank() == 0)])
    dist.all_reduce(word)
    return bool(word.item())
