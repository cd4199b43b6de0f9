"""Layers and GPUs divided into pipeline stages by dynamic programming over the slowest stage: the
outer of Alpa's two levels (arXiv:2201.12023, section 5).

Under 1F1B a step of B microbatches takes `sum(t_i) + (B - 1) max(t_i)`. For each bound of the
slowest stage the least sum is found by dynamic programming from the last stage on; a stage with s
stages after it keeps the activations of s + 1 microbatches, which its costs already count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Costs = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Division:
    """Stages, first to last."""

    layers: tuple[int, ...]
    submeshes: tuple[int, ...]
    """Ranks of each stage."""
    slowest: float
    """Seconds of a microbatch on the slowest stage."""
    seconds: float
    """Of a step."""


@dataclass
class StageDivision:
    """The division of one model over one cluster.

    Args:
        costs: Submesh (ranks) -> seconds of a microbatch `[S, 2, 2, L + 1]`: by stages after this
            one, by whether it is the first and the last, by layers. Infinite where it does not fit.
        devices: Ranks of all stages together.
        microbatches: Of a step.
    """

    costs: Mapping[int, Costs]
    devices: int
    microbatches: int
    _windows: Costs = field(init=False)

    def __post_init__(self) -> None:
        layers = self._layers
        at = np.arange(layers + 1)[:, None] - np.arange(layers + 1)[None, :]
        self._windows = np.where(at >= 0, at, layers + 1)  # the row after the last is infinite

    @property
    def _layers(self) -> int:
        return int(next(iter(self.costs.values())).shape[-1]) - 1

    @property
    def _most_stages(self) -> int:
        most = int(next(iter(self.costs.values())).shape[0])
        return min(most, self._layers, self.devices // min(self.costs))

    def best(self) -> Division | None:
        """The division whose step takes least; None where none fits."""
        bounds = self._bounds()
        start = self._first_feasible(bounds)
        if start is None:
            return None
        least_sum, found = self._least_sum(np.inf)[0], None
        for bound in bounds[start:]:
            waiting = (self.microbatches - 1) * bound
            if found is not None and waiting + least_sum >= found.seconds:
                break
            found = min(filter(None, (found, self._bounded(bound))), key=lambda d: d.seconds)
        return found

    def _bounds(self) -> list[float]:
        """Every stage's seconds may be the slowest's."""
        values = np.unique(np.concatenate([own.ravel() for own in self.costs.values()]))
        return [float(value) for value in values[np.isfinite(values)]]

    def _first_feasible(self, bounds: list[float]) -> int | None:
        low, high = 0, len(bounds)
        while low < high:
            middle = (low + high) // 2
            if np.isfinite(self._least_sum(bounds[middle])[0]):
                high = middle
            else:
                low = middle + 1
        return low if low < len(bounds) else None

    def _bounded(self, bound: float) -> Division | None:
        total, stages, tables = self._least_sum(bound)
        if not np.isfinite(total):
            return None
        picked = list(self._walk(bound, stages, tables))
        slowest = max(seconds for *_, seconds in picked)
        step = sum(seconds for *_, seconds in picked) + (self.microbatches - 1) * slowest
        layers, submeshes, _ = zip(*picked)
        return Division(layers, submeshes, slowest, step)

    def _least_sum(self, bound: float) -> tuple[float, int, list[Costs]]:
        """(least sum of seconds, its number of stages, tables by number of last stages); a table
        has the least sum of the last stages by [layers, ranks] that they take.
        """
        layers, devices = self._layers, self.devices
        table = np.full((layers + 2, devices + 1), np.inf)
        table[0, 0] = 0.0
        tables, totals = [table], [np.inf]
        for after in range(self._most_stages):
            table = self._one_more(tables[-1], after, bound)
            tables.append(table)
            totals.append(float(table[layers, devices]))
        stages = int(np.argmin(totals))
        return totals[stages], stages, tables

    def _one_more(self, before: Costs, after: int, bound: float) -> Costs:
        """The table with one more stage in front of the last `after`."""
        layers, devices = self._layers, self.devices
        table = np.full_like(before, np.inf)
        used = np.flatnonzero(np.isfinite(before).any(0))
        for ranks, own in self.costs.items():
            columns = used[used + ranks <= devices]
            if not columns.size:
                continue
            inner, first = (
                np.where(
                    own[after, i, int(after == 0)] <= bound, own[after, i, int(after == 0)], np.inf
                )
                for i in (0, 1)
            )
            reached = before[:, columns][self._windows]  # [layers so far, layers of the stage, d]
            sums = (reached + inner[None, :, None]).min(1)
            sums[layers] = (reached[layers] + first[:, None]).min(0)
            at = columns + ranks
            table[: layers + 1, at] = np.minimum(table[: layers + 1, at], sums)
        return table

    def _walk(
        self, bound: float, stages: int, tables: list[Costs]
    ) -> Iterator[tuple[int, int, float]]:
        """(layers, ranks, seconds) of each stage, first to last."""
        left, devices = self._layers, self.devices
        for after in reversed(range(stages)):
            ends = int(left == self._layers), int(after == 0)
            options = (
                (
                    own[after, *ends, count] + tables[after][left - count, devices - ranks],
                    ranks,
                    count,
                )
                for ranks, own in self.costs.items()
                if ranks <= devices
                for count in range(1, left + 1)
                if own[after, *ends, count] <= bound
            )
            _, ranks, count = min(options)
            yield count, ranks, float(self.costs[ranks][after, *ends, count])
            left, devices = left - count, devices - ranks
