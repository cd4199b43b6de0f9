"""Measurement loop of one rank: visit all points in turn, round by round.

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

from workbench.engine.calibrate.call_stamps import added
from workbench.engine.calibrate.collective_points import collective_points
from workbench.engine.calibrate.host_optimizer_points import host_optimizer_points
from workbench.engine.calibrate.local_points import Point, local_points
from workbench.engine.calibrate.measured_sizes import CalibrationSurvey
from workbench.engine.calibrate.operator_points import operator_points
from workbench.engine.calibrate.timing import Stopwatch
from workbench.engine.calibrate.turns import Turns
from workbench.engine.calibrate.whole_steps import step_points

FEWEST_CALLS, MOST_CALLS = 4, 256
"""Calls of a collective in a visit."""
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
CPU_SECTION = "collective_cpu"
"""Section of the CPU seconds of a collective; its own labels are those of its seconds."""


def measure_points(
    rank: int,
    survey: CalibrationSurvey,
    device_type: str,
    threads: int,
    crowded: bool,
    seconds: float,
    turns: Turns,
    place: int,
    progress: Progress,
) -> list[PointSample]:
    """Measure all points on this rank, in rounds, each in a turn of its world.

    Args:
        rank: This rank.
        survey: The points.
        device_type: cpu or cuda.
        threads: Threads of this rank.
        crowded: Ranks share cores: only collectives are measured.
        seconds: No round begins later; all worlds have one at least.
        turns: In which worlds measure.
        place: Of this world among them.
        progress: Called after each round with the seconds since all worlds are prepared.

    Returns:
        A sample per point visited.
    """
    torch.set_num_threads(threads)
    device = _device(device_type, rank)
    watches = _watches(device, threads)
    points = _prepared(_points(survey, device, crowded))
    found: list[dict[str, list[float]]] = [{} for _ in points]
    if rank == 0:
        turns.ready()
    begin = time.monotonic()
    for rounds in itertools.count():
        late = rounds > 0 and time.monotonic() - begin > seconds
        if _any_rank(rank == 0 and not turns.take(place, late)):
            break
        for point, seen in zip(points, found):
            for section, value in _visit(
                point, watches[point.how], survey.window_of(point.how)
            ).items():
                seen.setdefault(section, []).append(value)
        if rank == 0:
            turns.pass_on(place)
            progress(time.monotonic() - begin)
    if rank == 0:
        turns.pass_on(place)
    return [each for pair in zip(points, found) for each in _samples(*pair)]


def _points(survey: CalibrationSurvey, device: torch.device, crowded: bool) -> list[Point]:
    """The survey's; ranks that share a core would time the operating system's scheduler, but for
    collectives.
    """
    found = [*collective_points(survey, device)]
    if not crowded:
        found += local_points(survey, device)
        found += step_points(survey, device)
        found += operator_points(survey)
        found += host_optimizer_points(survey)
    return found


def _prepared(points: list[Point]) -> list[Point]:
    """The points that the backend has, warmed up."""
    return [point for point in points if not _any_rank(_refused(point))]


def _refused(point: Point) -> bool:
    try:
        point.call()
    except (RuntimeError, ValueError, NotImplementedError):
        return True
    return False


def _watches(device: torch.device, threads: int) -> dict[str, Stopwatch]:
    """The clock of each kind of point: CPU time for points that wait for no other rank."""
    wall, own = Stopwatch(device), Stopwatch(device, time.process_time)
    one = threads == 1
    cores = own if one else Stopwatch(torch.device("cpu"))
    return {"together": wall, "alone": own if one else wall, "host": own, "cores": cores}


def _samples(point: Point, seen: dict[str, list[float]]) -> list[PointSample]:
    """CPU seconds are each rank's own, whatever the point is."""
    return [
        PointSample(section, point.labels, "alone" if section == CPU_SECTION else point.how, values)
        for section, values in seen.items()
    ]


def _visit(point: Point, watch: Stopwatch, window: float) -> dict[str, float]:
    """Seconds of one call, by section."""
    if point.how == "together":
        return _call_between_work(point, watch, _calls_per_visit(point, watch, window))
    _any_rank(False)
    return {point.section: watch.window(point.call, window) / point.repeats}


def _call_between_work(point: Point, watch: Stopwatch, calls: int) -> dict[str, float]:
    """Mean seconds, and CPU seconds, that one call adds to the work between two."""
    if point.between is None:
        return {point.section: watch.of(point.call, calls) / calls}
    more = added(point.between, point.call, calls)
    return {
        point.section: max(float(more.seconds.mean()), LEAST_SECONDS),
        CPU_SECTION: max(more.cpu_seconds, LEAST_SECONDS),
    }


def _device(device_type: str, rank: int) -> torch.device:
    if device_type != "cuda":
        return torch.device(device_type)
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _calls_per_visit(point: Point, watch: Stopwatch, window: float) -> int:
    """Calls of a collective, with the work between them, that fill a window on the slowest rank."""
    begin = time.monotonic()
    watch.of(point.call, 1)
    if point.between is not None:
        point.between()
    slowest = torch.tensor([time.monotonic() - begin], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(FEWEST_CALLS, min(MOST_CALLS, int(window / slowest.item())))


def _any_rank(here: bool) -> bool:
    """Whether any rank says so; the all-reduce also starts all ranks' visits together."""
    word = torch.tensor([float(here)])
    dist.all_reduce(word)
    return bool(word.item())
