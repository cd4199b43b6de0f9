"""From telemetry records to the frames of a Profile, little by little while a run goes on."""

from __future__ import annotations

from typing import Any

from workbench.profile import ALLOCATED, COLUMNS, Profile, frame

Rows = dict[str, list[dict[str, Any]]]


class Measured:
    """The measured Profile of one run, as far as its records have been added.

    `add` returns only the rows that are new, by frame, which is what a live chart needs.
    """

    def __init__(self, run: str, world_size: int, capacity_bytes: int | None = None) -> None:
        self.run = run
        self.world_size = world_size
        self.capacity_bytes = capacity_bytes
        self.hello: dict[int, dict[str, Any]] = {}
        self.phase: dict[int, str] = {}
        self.evaluation: dict[int, float] = {}
        self.checkpoints: dict[int, str] = {}
        self._rows: Rows = {kind: [] for kind in COLUMNS}

    def add(self, records: list[dict[str, Any]]) -> Rows:
        """Take in records of a `Reader`; the new rows of each frame."""
        new: Rows = {kind: [] for kind in COLUMNS}
        for record in records:
            self._take(record, new)
        for kind, rows in new.items():
            self._rows[kind] += rows
        return new

    def profile(self) -> Profile:
        """Everything added so far. Frames are built anew: for deltas use what `add` returns."""
        notes: dict[str, Any] = {
            "evaluation": [{"step": step, "loss": loss} for step, loss in sorted(self.evaluation.items())],
            "checkpoints": [self.checkpoints[step] for step in sorted(self.checkpoints)],
        }
        return Profile(
            run=self.run,
            source="measured",
            world_size=self.world_size,
            representative={rank: rank for rank in range(self.world_size)},
            capacity_bytes=self.capacity_bytes,
            notes=notes,
            **{kind: frame(kind, rows) for kind, rows in self._rows.items()},
        )

    def _take(self, record: dict[str, Any], new: Rows) -> None:
        kind, rank = record["kind"], record["rank"]
        if kind == "step":
            new["steps"].append(self._row(record, record))
            new["memory"] += self._allocated(record)
        elif kind in COLUMNS:
            new[kind] += [self._row(record, row) for row in record["rows"] or []]
        elif kind == "hello":
            self.hello[rank] = record
        elif kind == "phase":
            self.phase[rank] = record["phase"]
        elif kind == "evaluation":
            self.evaluation[record["step"]] = record["loss"]
        elif kind == "checkpoint":
            self.checkpoints[record["step"]] = record["path"]

    def _row(self, record: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "run": self.run, "source": "measured", "rank": record["rank"], "step": record["step"]}

    def _allocated(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """The allocator's count at the end of a step, which every step has; sampled steps have more."""
        if record["bytes"] is None:
            return []
        stage = self.hello.get(record["rank"], {}).get("stage")
        row = {"stage": stage, "moment": "after_optimizer", "tier": "device", "category": ALLOCATED}
        return [self._row(record, {**row, "bytes": record["bytes"]})]
