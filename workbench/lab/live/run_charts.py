"""The charts of a run that is going on: which there are, and how each grows by new rows."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.lab.charts import (
    collectives,
    loss,
    memory,
    memory_map,
    memory_steps,
    step_time_parts,
    throughput,
    timeline,
)
from workbench.lab.charts.loss_chart import VALIDATION, loss_row
from workbench.lab.charts.loss_chart import loss_figure as loss_figure
from workbench.lab.charts.memory_map import has_memory_map
from workbench.lab.charts.memory_steps import EACH_PEAK, STEP_END, STEP_PEAK, predictions
from workbench.lab.charts.memory_steps import memory_steps_figure as counts_figure
from workbench.lab.charts.step_parts import TRACED_NOTE
from workbench.lab.charts.throughput import throughput_figure as pace_figure
from workbench.lab.charts.traced_ranks import TracedSteps
from workbench.lab.live.board import Board
from workbench.lab.live.figure import Figure
from workbench.lab.live.live_series import BoundedSeries, LatestSamples, Rows
from workbench.profile import ALLOCATED, Profile, frame
from workbench.units import byte_unit


class RunCharts:
    """Charts of one run on a board. `beside` are profiles drawn next to what is measured, on the
    plan's `device`.

    Loss, throughput and memory by step grow by the new rows; the others are built again from
    each rank's last sample.
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
        self.latest, self.traced = LatestSamples(), TracedSteps()
        # CUDA counts each step, CPU sampled ones.
        self.moment = STEP_PEAK if device == "cpu" else EACH_PEAK
        self.losses, self.throughput = BoundedSeries(1), BoundedSeries(self.world_size)
        self.allocated = BoundedSeries(self.world_size, worst="largest")
        self.validation: Rows = []
        self._unit = ("", 1)
        sampled = [*self.beside, empty]
        first = [
            loss(empty),
            throughput(empty),
            memory(*sampled),
            memory_steps(empty, self.beside),
            collectives(*sampled),
            step_time_parts(*self.beside),
            timeline(*sampled[:1]),
        ]
        board.put(*first, *self._map(self.beside))

    def add_rows(self, new: dict[str, Rows], evaluations: Rows) -> None:
        """New rows of each frame as `Measured.add` gives them, and new validation losses
        ({step, loss}).
        """
        steps = [row for row in new["steps"] if row["seconds"]]
        self._grow_losses([row for row in steps if row["rank"] == 0], evaluations)
        self._grow_throughput(
            [(row["rank"], row["step"], row["tokens"] / row["seconds"]) for row in steps]
        )
        self._grow_allocated(self._allocated(new))
        self._sample("memory", [row for row in new["memory"] if row["moment"] != STEP_END])
        self._sample("timeline", new["timeline"])
        self._sample("collectives", new["collectives"])

    def figures(self, measured: Profile) -> list[Figure]:
        """The same charts of everything that was measured, to stand still."""
        sampled = [*self.beside, measured]
        validation = frame(
            "steps", [found | {"run": self.run} for found in measured.notes.get("evaluation", [])]
        )
        shown = [
            loss(measured, evaluations=validation),
            throughput(measured),
            memory(*sampled),
            memory_steps(measured, self.beside),
        ]
        return [
            *shown,
            *self._map([measured]),
            collectives(*sampled),
            step_time_parts(*sampled),
            timeline(measured if len(measured.timeline) else sampled[0]),
        ]

    def _grow_losses(self, steps: Rows, evaluations: Rows) -> None:
        points = [
            loss_row(self.run, found["step"], found["loss"], VALIDATION) for found in evaluations
        ]
        self.validation += points
        change = self.losses.add([(0, found["step"], _number(found["loss"])) for found in steps])
        lines = [
            loss_row(self.run, point["step"], point["value"]) | {"open": point.get("open", False)}
            for point in (change.rows if change else [])
        ]
        if change and change.replace:
            width = self.losses.width
            self.board.put(loss_figure(lines + self.validation, [self.run], "measured", width))
        elif lines or points:
            self.board.extend("loss", lines + points)

    def _grow_throughput(self, values: list[tuple[int, int, float]]) -> None:
        change = self.throughput.add(values)
        if change and change.replace:
            frame, width = self.throughput.to_frame(), self.throughput.width
            self.board.put(pace_figure(frame, self.world_size, "measured", width))
        elif change:
            self.board.extend("throughput", change.rows)

    def _allocated(self, new: dict[str, Rows]) -> list[tuple[int, int, float]]:
        """(rank, step, bytes) of what the allocator has counted at `moment`."""
        if self.moment == EACH_PEAK:
            counts = [(row, row.get(EACH_PEAK)) for row in new["steps"]]
        else:
            counts = [
                (row, row["bytes"])
                for row in new["memory"]
                if row["moment"] == self.moment and row["category"] == ALLOCATED
            ]
        return [(row["rank"], row["step"], size) for row, size in counts if size is not None]

    def _grow_allocated(self, values: list[tuple[int, int, float]]) -> None:
        change = self.allocated.add(values)
        if change is None:
            return
        known = [p.size for p in predictions(self.beside, self.moment)]
        unit = byte_unit([self._unit[1], *known, *(value for _, _, value in values)])
        if change.replace or unit != self._unit:
            self._unit = unit
            counts, width = self.allocated.to_frame(), self.allocated.width
            beside = predictions(self.beside, self.moment)
            self.board.put(
                counts_figure(counts, self.world_size, "measured", self.moment, width, beside)
            )
        else:
            self.board.extend(
                "memory_steps",
                [point | {"value": point["value"] / unit[1]} for point in change.rows],
            )

    def _sample(self, kind: str, rows: Rows) -> None:
        if not rows:
            return
        self.latest.add(kind, rows)
        profile = self.latest.profile(self.run, self.world_size, self.capacity_bytes)
        sampled = [*self.beside, profile]
        if kind == "memory":
            self.board.put(memory(*sampled), *self._map([profile]))
        elif kind == "collectives":
            self.board.put(collectives(*sampled))
        else:
            # The banner says the step time, which goes on; these are of the traced steps alone.
            self.traced.add(rows)
            profile.notes[TRACED_NOTE] = self.traced
            self.board.put(timeline(profile), step_time_parts(*sampled))

    def _map(self, profiles: Sequence[Profile]) -> list[Figure]:
        """The map of all ranks where there are too many for a bar each."""
        return [memory_map(profile) for profile in profiles[:1] if has_memory_map(self.world_size)]


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
