"""The charts of a run that is going on: which there are, and how each follows new rows."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.lab.charts import (
    collectives,
    loss,
    memory,
    memory_map,
    memory_steps,
    parts,
    throughput,
    timeline,
)
from workbench.lab.charts.loss_chart import HELD_OUT, row
from workbench.lab.charts.loss_chart import figure as loss_figure
from workbench.lab.charts.memory_map import drawable
from workbench.lab.charts.memory_steps import END, PEAK
from workbench.lab.charts.memory_steps import figure as counts_figure
from workbench.lab.charts.throughput import figure as pace_figure
from workbench.lab.live.board import Board
from workbench.lab.live.figure import Figure
from workbench.lab.live.live_series import Latest, Rows, Series
from workbench.profile import ALLOCATED, Profile, frame
from workbench.units import byte_unit


class RunView:
    """Charts of one run on a board. `beside` are profiles drawn next to what is measured, on a
    card's `device`.

    Loss, throughput and memory by step grow by the new rows; the others are made anew from each
    rank's last sample.
    """

    def __init__(
        self, board: Board, empty: Profile, beside: Sequence[Profile], device: str
    ) -> None:
        self.board, self.run, self.world_size, self.beside = (
            board,
            empty.run,
            empty.world_size,
            list(beside),
        )
        self.capacity_bytes = empty.capacity_bytes
        self.latest = Latest()
        self.moment = PEAK if device == "cpu" else END  # what each step of this device can count
        self.losses, self.pace = Series(1), Series(self.world_size)
        self.counts = Series(self.world_size, worst="largest")
        self.held_out: Rows = []
        self._unit = ("", 1)
        sampled = [*self.beside, empty]
        first = [
            loss(empty),
            throughput(empty),
            memory(*sampled),
            memory_steps(empty),
            collectives(*sampled),
            parts(*self.beside),
            timeline(*sampled[:1]),
        ]
        board.put(*first, *self._map(self.beside))

    def take(self, new: dict[str, Rows], evaluations: Rows) -> None:
        """New rows of each frame as `Measured.add` gives them, and new losses on held-out text
        ({step, loss}).
        """
        steps = [row for row in new["steps"] if row["seconds"]]
        self._grow_losses(
            [row for row in steps if row["rank"] == 0 and row["loss"] is not None], evaluations
        )
        self._grow_pace(
            [(row["rank"], row["step"], row["tokens"] / row["seconds"]) for row in steps]
        )
        counts = [
            row
            for row in new["memory"]
            if row["moment"] == self.moment and row["category"] == ALLOCATED
        ]
        self._grow_counts([(row["rank"], row["step"], row["bytes"]) for row in counts])
        self._sample("memory", [row for row in new["memory"] if row["moment"] != END])
        self._sample("timeline", new["timeline"])
        self._sample("collectives", new["collectives"])

    def figures(self, measured: Profile) -> list[Figure]:
        """The same charts of everything that was measured, to stand still."""
        sampled = [*self.beside, measured]
        held_out = frame(
            "steps", [found | {"run": self.run} for found in measured.notes.get("evaluation", [])]
        )
        shown = [
            loss(measured, evaluations=held_out),
            throughput(measured),
            memory(*sampled),
            memory_steps(measured),
        ]
        return [
            *shown,
            *self._map([measured]),
            collectives(*sampled),
            parts(*sampled),
            timeline(measured if len(measured.timeline) else sampled[0]),
        ]

    def _grow_losses(self, steps: Rows, evaluations: Rows) -> None:
        points = [row(self.run, found["step"], found["loss"], HELD_OUT) for found in evaluations]
        self.held_out += points
        change = self.losses.take([(0, found["step"], found["loss"]) for found in steps])
        lines = (
            [row(self.run, point["step"], point["value"]) for point in change.rows]
            if change
            else []
        )
        if change and change.replace:
            self.board.put(loss_figure(lines + self.held_out, [self.run], "measured"))
        elif lines or points:
            self.board.extend("loss", lines + points)

    def _grow_pace(self, values: list[tuple[int, int, float]]) -> None:
        change = self.pace.take(values)
        if change and change.replace:
            self.board.put(pace_figure(self.pace.table(), self.world_size, "measured"))
        elif change:
            self.board.extend("throughput", change.rows)

    def _grow_counts(self, values: list[tuple[int, int, float]]) -> None:
        change = self.counts.take(values)
        if change is None:
            return
        unit = byte_unit([self._unit[1], *(value for _, _, value in values)])
        if change.replace or unit != self._unit:
            self._unit = unit
            self.board.put(
                counts_figure(self.counts.table(), self.world_size, "measured", self.moment)
            )
        else:
            self.board.extend(
                "memory_steps",
                [point | {"value": point["value"] / unit[1]} for point in change.rows],
            )

    def _sample(self, kind: str, rows: Rows) -> None:
        if not rows:
            return
        self.latest.take(kind, rows)
        profile = self.latest.profile(self.run, self.world_size, self.capacity_bytes)
        sampled = [*self.beside, profile]
        if kind == "memory":
            self.board.put(memory(*sampled), *self._map([profile]))
        else:
            self.board.put(collectives(*sampled) if kind == "collectives" else timeline(profile))

    def _map(self, profiles: Sequence[Profile]) -> list[Figure]:
        """The map of all ranks where there are too many for a bar each."""
        return [memory_map(profile) for profile in profiles[:1] if drawable(self.world_size)]
