"""What is kept of the candidates that go by: the best few by an objective, and the Pareto front of
time and memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from workbench.costmodel.inputs.config import Array
from workbench.planner.search.cell_evaluation import EvaluatedCell
from workbench.planner.search.cells import Cell

MEMORY_BINS = 64
"""Steps of memory in which a candidate is first held against the front."""


@dataclass(frozen=True, order=True)
class RankedCandidate:
    """One candidate that was kept."""

    score: float
    seconds: float
    peak: float
    cell_index: int
    """Of its cell in the space."""
    candidate_index: int
    """Of the candidate in its cell."""
    cell: Cell = field(compare=False)


class BestCandidates:
    """The best `most` by score; and every candidate that no other beats in both time and memory."""

    def __init__(self, most: int, capacity: float) -> None:
        self.most, self.capacity = most, capacity
        self.top: list[RankedCandidate] = []
        self.front: list[RankedCandidate] = []
        self._cells = 0
        self._floor = np.full(MEMORY_BINS + 2, np.inf)
        """The fastest of the front that needs no more memory than the step begins with."""

    def take(self, cell: Cell, e: EvaluatedCell, fits: NDArray[np.bool_], score: Array) -> None:
        """Look through a cell; less score is better. Few candidates are looked at closely."""
        bins = np.minimum(e.peak * (MEMORY_BINS / self.capacity), MEMORY_BINS + 1).astype(int)
        worst = self.top[-1].score if len(self.top) == self.most else np.inf
        limit = self._floor[bins]
        if score is e.seconds:
            good = e.seconds <= np.where(fits, np.maximum(limit, worst), -np.inf)
        else:
            good = fits & ((e.seconds <= limit) | (score <= worst))
        near = np.flatnonzero(np.broadcast_to(good, e.shape))
        if len(near):
            self._keep(cell, near, e.at(e.seconds, near), e.at(e.peak, near), e.at(score, near))
        self._cells += 1

    def _keep(
        self, cell: Cell, near: NDArray[np.int64], seconds: Array, peak: Array, score: Array
    ) -> None:
        def found(place: int) -> RankedCandidate:
            one, two, three = (float(values[place]) for values in (score, seconds, peak))
            return RankedCandidate(one, two, three, self._cells, int(near[place]), cell)

        ranked = np.lexsort((near, peak, seconds, score))[: self.most]
        self.top = sorted([*self.top, *map(found, ranked)])[: self.most]
        order = np.lexsort((near, peak, seconds))
        lowest = np.minimum.accumulate(peak[order])
        better = order[np.r_[True, lowest[1:] < lowest[:-1]]]
        self.front = pareto_front([*self.front, *map(found, better)])
        peaks, times = (
            np.array([getattr(one, name) for one in self.front]) for name in ("peak", "seconds")
        )
        for step in range(MEMORY_BINS + 2):
            own = times[peaks <= step * self.capacity / MEMORY_BINS]
            self._floor[step] = own.min() if len(own) else np.inf


def pareto_front(found: list[RankedCandidate]) -> list[RankedCandidate]:
    """Those that no other beats in both step time and peak, fastest first."""
    kept: list[RankedCandidate] = []
    for one in sorted(
        found, key=lambda each: (each.seconds, each.peak, each.cell_index, each.candidate_index)
    ):
        if not kept or one.peak < kept[-1].peak:
            kept.append(one)
    return kept
