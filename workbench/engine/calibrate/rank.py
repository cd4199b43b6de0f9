"""What one rank does: visit every point again and again, in turn with the others, until the time is over.

Points are interleaved, so that a neighbour's burst of work spoils one visit of many points, not all visits of one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from workbench.engine.calibrate.collective import together
from workbench.engine.calibrate.points import Point, alone
from workbench.engine.calibrate.steps import steps
from workbench.engine.calibrate.survey import Survey
from workbench.engine.calibrate.timing import Stopwatch

MOST_CALLS = 256
Told = Callable[[float], None]


@dataclass(frozen=True)
class Sample:
    """Seconds of one call of one point: one entry a visit."""

    section: str
    labels: dict[str, Any]
    how: str
    seconds: list[float]


def measure(
    rank: int, survey: Survey, device_type: str, threads: int, crowded: bool, seconds: float, every: bool, told: Told
) -> list[Sample]:
    """All points on this rank for about `seconds`; `told` hears the seconds spent.

    `every`: each point is visited, however long it takes. `crowded`: ranks share cores, so that a visit must last
    several of the scheduler's turns.
    """
    begin = time.monotonic()
    torch.set_num_threads(threads)
    device = _device(device_type, rank)
    window = survey.window * (4 if crowded else 1)
    watch = Stopwatch(device)
    points = [*alone(survey, device), *steps(survey, device), *together(survey, device)]
    if crowded:  # what takes turns on a core takes as many times longer; nothing is learned from timing the scheduler
        points = [point for point in points if point.how != "host"]
    calls = [_prepared(point, watch, survey.window) for point in points]
    found: list[list[float]] = [[] for _ in points]
    for rounds in itertools.count():
        for point, often, seen in zip(points, calls, found):
            over = time.monotonic() - begin > seconds and (not every or rounds > 0)
            if _agreed(over):
                return [Sample(p.section, p.labels, p.how, s) for p, s in zip(points, found) if s]
            if often:
                seen.append(_visit(point, watch, often, window))
        if rank == 0:
            told(time.monotonic() - begin)
    raise AssertionError("a count has no end")


def _visit(point: Point, watch: Stopwatch, calls: int, window: float) -> float:
    """Seconds of one call."""
    if point.how == "together":
        return watch.of(point.call, calls) / calls
    return watch.window(point.call, window, quickest=point.how == "host")


def _device(device_type: str, rank: int) -> torch.device:
    if device_type != "cuda":
        return torch.device(device_type)
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _prepared(point: Point, watch: Stopwatch, window: float) -> int:
    """Warm up; how often a visit calls the point, agreed by all ranks. 0: this backend cannot do it."""
    try:
        point.call()
        watch.of(point.call, 1)
        seconds = watch.of(point.call, 1)
    except (RuntimeError, ValueError, NotImplementedError):
        seconds = float("inf")
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return 0 if slowest.isinf() else max(1, min(MOST_CALLS, int(window / max(slowest.item(), 1e-7))))


def _agreed(over: bool) -> bool:
    """Whether rank 0 says that the time is over; also what lets all ranks start a visit together."""
    word = torch.tensor([float(over and dist.get_rank() == 0)])
    dist.all_reduce(word)
    return bool(word.item())
