"""What a live view keeps of a run: series that grow by deltas, and the last sample of each rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd

from workbench.lab import rank_selection
from workbench.lab.charts import line_series
from workbench.profile import COLUMNS, Profile, frame
from workbench.runs.store.record_thinning import extremes

Rows = list[dict[str, Any]]
Point = tuple[int, int, float]
"""Rank, step, value."""


@dataclass
class ChartChange:
    """What a chart must do: add `rows`, or replace what it shows by `rows`."""

    rows: Rows
    replace: bool


@dataclass
class BoundedSeries:
    """One value a rank and step, bounded in size however long the run is.

    Beyond `line_series.MAX_POINTS` steps it has what `line_series.thin_steps` draws of them. Up to
    16 ranks a part of steps that is over is sent once; rows of the part that is going on are marked
    `open`, and go with the next change. Beyond, all is sent again, at most once a second.
    """

    world_size: int
    worst: Literal["largest", "smallest"] = "smallest"
    clock: Callable[[], float] = time.monotonic
    width: int = 1
    """Steps of a part, see `line_series.step_width`."""
    _parts: set[int] = field(default_factory=set)
    _over: list[Point] = field(default_factory=list)
    """Values of parts that are over."""
    _open: list[Point] = field(default_factory=list)
    _drawn: float = float("-inf")
    _stale: bool = False

    def add(self, values: list[Point]) -> ChartChange | None:
        """Add values.

        Args:
            values: (rank, step, value) each; a value may be not finite.

        Returns:
            What the chart must do; None where it need not change yet.
        """
        if widened := self._widen(step for _, step, _ in values):
            self._open, self._over = self._over + self._open, []
        over = self._close(values) if values else []
        if self.world_size <= rank_selection.MAX_RANKS_SHOWN and not widened:
            rows = [line_series.rank_row(*point, False) for point in over]
            rows += [line_series.rank_row(*point, True) for point in self._open]
            return ChartChange(rows, False) if values else None
        self._stale = self._stale or bool(values)
        if not widened and (not self._stale or self.clock() - self._drawn < 1):
            return None
        self._drawn, self._stale = self.clock(), False
        return self.replacement()

    def replacement(self) -> ChartChange:
        """Every stored value, to replace what the chart shows."""
        frame = self.to_frame()
        rows = line_series.series_rows(frame, self.world_size, self.worst, self.width)
        return ChartChange(rows, True)

    def to_frame(self) -> pd.DataFrame:
        """Every stored value as a frame (rank, step, value, open)."""
        found = pd.DataFrame(self._over + self._open, columns=["rank", "step", "value"])
        return found.assign(open=[False] * len(self._over) + [True] * len(self._open))

    def _widen(self, steps: Iterable[int]) -> bool:
        """Take in `steps`; True where parts had to become wider."""
        before = self.width
        self._parts |= {step // self.width for step in steps}
        while len(self._parts) > line_series.max_parts():
            self.width, self._parts = 2 * self.width, {part // 2 for part in self._parts}
        return self.width != before

    def _close(self, values: list[Point]) -> list[Point]:
        """Add values to the parts that go on; what is drawn of parts that are over now, as
        `line_series.thin_steps` has it.
        """
        parts: dict[int, dict[int, list[Point]]] = {}
        for point in self._open + values:
            parts.setdefault(point[0], {}).setdefault(point[1] // self.width, []).append(point)
        over: list[Point] = []
        self._open = []
        for own in parts.values():
            newest = max(own)
            for part, points in own.items():
                is_open = part == newest and self.width > 1
                places = extremes([value for _, _, value in points])
                places |= {len(points) - 1} if is_open else set()
                (self._open if is_open else over).extend(points[i] for i in sorted(places))
        self._over += over
        return over


@dataclass
class LatestSamples:
    """The rows of each rank's last sampled step, by frame."""

    _rows: dict[str, dict[int, Rows]] = field(
        default_factory=lambda: {kind: {} for kind in COLUMNS}
    )

    def add(self, kind: str, rows: Rows) -> None:
        """Rows of one frame, in order of steps for each rank."""
        for row in rows:
            stored = self._rows[kind].setdefault(row["rank"], [])
            if stored and stored[0]["step"] != row["step"]:
                stored = self._rows[kind][row["rank"]] = []
            stored.append(row)

    def profile(self, run: str, world_size: int, capacity_bytes: int | None) -> Profile:
        """The samples as a measured profile."""
        profile = Profile(run, "measured", world_size, capacity_bytes=capacity_bytes)
        for kind, stored in self._rows.items():
            setattr(profile, kind, frame(kind, [row for rows in stored.values() for row in rows]))
        return profile
