"""What is kept of the candidates that go by: the best few by an objective, and the Pareto front of
expected time and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from workbench.costmodel.inputs.config import Array
from workbench.planner.search.cell_evaluation import EvaluatedCell
from workbench.planner.search.cells import Cell

One = TypeVar("One")
Score = Callable[[Array, Array], Array]
"""(seconds of a step, seconds of it that compute) -> what is ranked by; grows with the seconds."""
Retries = tuple[Array, Array]
"""(logarithms of peaks, slow-down of the step by the allocator's retries at each)."""
MEMORY_BINS = 64
"""Steps of memory in which a candidate is first held against the front."""


def unbeaten(found: Iterable[One], figures: Callable[[One], tuple[float, float]]) -> list[One]:
    """Those that no other beats in both figures (seconds, memory), fastest first."""
    kept: list[One] = []
    for one in sorted(found, key=figures):
        if not kept or figures(one)[1] < figures(kept[-1])[1]:
            kept.append(one)
    return kept


@dataclass(frozen=True, order=True)
class RankedCandidate:
    """One candidate that was kept."""

    score: float
    expected: float
    """Seconds of a step, with the slow-down that is expected of a nearly full GPU."""
    peak: float
    cell_index: int
    """Of its cell in the space."""
    candidate_index: int
    """Of the candidate in its cell."""
    cell: Cell = field(compare=False)
    seconds: float = field(compare=False)
    """Of a step whose allocator does not retry."""


class BestCandidates:
    """The best `most` by score; and every candidate that no other beats in both expected time and
    memory.
    """

    def __init__(self, most: int, capacity: float, retries: Retries) -> None:
        self.most, self.capacity, self.retries = most, capacity, retries
        self.top: list[RankedCandidate] = []
        self.front: list[RankedCandidate] = []
        self._cells = 0
        self._floor = np.full(MEMORY_BINS + 2, np.inf)
        """The fastest of the front that needs no more memory than the step begins with."""

    def skip(self) -> None:
        """Leave a cell out of which nothing fits."""
        self._cells += 1

    def take(self, cell: Cell, e: EvaluatedCell, fits: NDArray[np.bool_], score: Score) -> None:
        """Look through a cell; less score is better. Few candidates are looked at closely: retries
        only ever make a step longer, so that one too slow without them is out.
        """
        bins = np.minimum(e.peak * (MEMORY_BINS / self.capacity), MEMORY_BINS + 1).astype(int)
        worst = self.top[-1].score if len(self.top) == self.most else np.inf
        limit, least = self._floor[bins], score(e.seconds, e.compute)
        if least is e.seconds:
            good = e.seconds <= np.where(fits, np.maximum(limit, worst), -np.inf)
        else:
            good = fits & ((e.seconds <= limit) | (least <= worst))
        near = np.flatnonzero(np.broadcast_to(good, e.shape))
        if len(near):
            seconds, peak, compute = (e.at(x, near) for x in (e.seconds, e.peak, e.compute))
            expected = expected_seconds(seconds, peak, self.retries)
            scores = score(expected, compute)
            kept = (expected <= e.at(limit, near)) | (scores <= worst)
            if kept.any():
                found = [x[kept] for x in (seconds, expected, peak, scores)]
                self._keep(cell, near[kept], *found)
        self._cells += 1

    def _keep(
        self,
        cell: Cell,
        near: NDArray[np.int64],
        seconds: Array,
        expected: Array,
        peak: Array,
        score: Array,
    ) -> None:
        def found(place: int) -> RankedCandidate:
            one, two, three, four = (
                float(values[place]) for values in (score, expected, peak, seconds)
            )
            return RankedCandidate(one, two, three, self._cells, int(near[place]), cell, four)

        ranked = np.lexsort((near, peak, expected, score))[: self.most]
        self.top = sorted([*self.top, *map(found, ranked)])[: self.most]
        order = np.lexsort((near, peak, expected))
        lowest = np.minimum.accumulate(peak[order])
        better = order[np.r_[True, lowest[1:] < lowest[:-1]]]
        self.front = pareto_front([*self.front, *map(found, better)])
        peaks, times = (
            np.array([getattr(one, name) for one in self.front]) for name in ("peak", "expected")
        )
        for step in range(MEMORY_BINS + 2):
            own = times[peaks <= step * self.capacity / MEMORY_BINS]
            self._floor[step] = own.min() if len(own) else np.inf


def expected_seconds(seconds: Array, peak: Array, retries: Retries) -> Array:
    """Seconds of steps with the slow-down that their peaks make likely."""
    peaks, slowdowns = retries
    return np.asarray(seconds * np.interp(np.log(peak), peaks, slowdowns))


def pareto_front(found: list[RankedCandidate]) -> list[RankedCandidate]:
    """Those that no other beats in both expected time and peak, fastest first."""
    kept: list[RankedCandidate] = []
    for one in sorted(
        found, key=lambda each: (each.expected, each.peak, each.cell_index, each.candidate_index)
    ):
        if not kept or one.peak < kept[-1].peak:
            kept.append(one)
    return kept
