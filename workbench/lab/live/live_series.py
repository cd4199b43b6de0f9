"""What a live view keeps of a run: series that grow by deltas, and the last sample of each rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd

from workbench.lab import rank_selection
from workbench.lab.charts import line_series
from workbench.profile import COLUMNS, Profile, frame

Rows = list[dict[str, Any]]


@dataclass
class ChartChange:
    """What a chart must do: add `rows`, or replace what it shows by `rows`."""

    rows: Rows
    replace: bool


@dataclass
class BoundedSeries:
    """One value a rank and step, bounded in size however long the run is.

    Up to 16 ranks each value is sent once, and every second step is dropped whenever there are too
    many; beyond, the band and the outliers are computed again, at most once a second.
    """

    world_size: int
    worst: Literal["largest", "smallest"] = "smallest"
    clock: Callable[[], float] = time.monotonic
    stride: int = 1
    _values: list[tuple[int, int, float]] = field(default_factory=list)
    _drawn: float = float("-inf")
    _stale: bool = False

    def add(self, values: list[tuple[int, int, float]]) -> ChartChange | None:
        """Add values.

        Args:
            values: (rank, step, value) each.

        Returns:
            What the chart must do; None where it need not change yet.
        """
        added = [value for value in values if value[1] % self.stride == 0]
        self._values += added
        if len(self._values) > 2 * line_series.MAX_POINTS * self.world_size:
            self.stride *= 2
            self._values = [value for value in self._values if value[1] % self.stride == 0]
            return self.replacement()
        if self.world_size <= rank_selection.MAX_RANKS_SHOWN:
            return (
                ChartChange(
                    line_series.series_rows(self.to_frame(added), self.world_size, self.worst),
                    False,
                )
                if added
                else None
            )
        self._stale = self._stale or bool(added)
        if not self._stale or self.clock() - self._drawn < 1:
            return None
        self._drawn, self._stale = self.clock(), False
        return self.replacement()

    def replacement(self) -> ChartChange:
        """Every stored value, to replace what the chart shows."""
        return ChartChange(
            line_series.series_rows(self.to_frame(self._values), self.world_size, self.worst), True
        )

    def to_frame(self, values: list[tuple[int, int, float]] | None = None) -> pd.DataFrame:
        """Values as a frame (rank, step, value)."""
        return pd.DataFrame(
            self._values if values is None else values, columns=["rank", "step", "value"]
        )


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
