"""From telemetry records to the frames of a Profile, little by little while a run goes on."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.profile import ALLOCATED, COLUMNS, Columns, Profile
from workbench.runs.store.telemetry_reader import Reader
from workbench.vocabulary import REWARDS

if TYPE_CHECKING:
    import pandas as pd

Rows = dict[str, list[dict[str, Any]]]
FrameRows = Sequence[tuple[str, Sequence[Mapping[str, Any]]]]
"""What a record holds of each frame: rows without the cells that they share, `SHARED`."""

ONE_STEP_OF = "one_step_of"
"""Key of `Profile.notes`: of so many steps of a long run one is here, and the extremes."""
RECENT_STEPS = 100
"""Steps over which the training loss of each source is averaged."""
SHARED = ("run", "source", "rank", "step")
"""The first columns of every frame: one value for all rows of a record."""


class MeasuredFrames:
    """The measured Profile of one run, as far as its records have been added.

    `add` returns only the rows that are new, by frame, which is what a live chart needs. Rows are
    stored by column: an object a row would take five times the memory.
    """

    def __init__(self, run: str, world_size: int, capacity_bytes: int | None = None) -> None:
        self.run = run
        self.world_size = world_size
        self.capacity_bytes = capacity_bytes
        self.hello: dict[int, dict[str, Any]] = {}
        self.phase: dict[int, str] = {}
        self.evaluation: dict[int, dict[str, float]] = {}
        self.evaluation_by_source: dict[int, list[dict[str, Any]]] = {}
        """Step -> held-out loss of each source of a mixture."""
        self.losses_by_source: dict[int, list[dict[str, Any]]] = {}
        """One of the last `RECENT_STEPS` -> training loss and tokens of each source."""
        self.rewards: dict[int, dict[str, float]] = {}
        """The same -> means over its pairs, where answers are compared."""
        self.checkpoints: dict[int, str] = {}
        self.left_out: list[str] = []
        """What of the telemetry is not here, in words; see `Reader.left_out`."""
        self.every = 1
        """Number of steps of which one is here at least; see `Thinning`."""
        self._columns = {
            kind: {name: list[Any]() for name in names} for kind, names in COLUMNS.items()
        }

    def add(self, records: list[dict[str, Any]]) -> Rows:
        """Take in records of a `Reader`; the new rows of each frame."""
        new = self.rows(records)
        for kind, columns in self._columns.items():
            for name, column in columns.items():
                column.extend(row.get(name) for row in new[kind])
        return new

    def rows(self, records: list[dict[str, Any]]) -> Rows:
        """The rows of `records`, by frame; the rows are not stored, all else of the records is."""
        new: Rows = {kind: [] for kind in COLUMNS}
        for record in self._known(records):
            for kind, rows in self._take(record):
                new[kind] += [self._row(record, row) for row in rows]
        return new

    def lines(self, records: list[dict[str, Any]]) -> dict[str, list[str]]:
        """The same rows as lines of CSV, byte for byte what `csv.writer` makes of them, only
        faster.
        """
        new: dict[str, list[str]] = {kind: [] for kind in COLUMNS}
        run = csv_cell(self.run)
        for record in self._known(records):
            for kind, rows in self._take(record):
                for row in rows:
                    values = map(row.get, ROW_COLUMNS[kind])
                    texts = [
                        "" if v is None else csv_cell(v) if type(v) is str else repr(v)
                        for v in values
                    ]
                    new[kind].append(
                        f"{run},measured,{record['rank']},{record['step']},{','.join(texts)}\n"
                    )
        return new

    def read(self, reader: Reader) -> MeasuredFrames:
        """Add all that `reader` has, and what it had to leave out; itself."""
        for records in reader.batches():
            self.add(records)
        self.left_out, self.every = reader.left_out, reader.every
        return self

    def profile(self) -> Profile:
        """Everything added so far. Frames are built anew: for deltas use what `add` returns."""
        notes: dict[str, Any] = {
            "evaluation": [
                {"step": step, **found} | self._by_source(step)
                for step, found in sorted(self.evaluation.items())
            ],
            "checkpoints": [self.checkpoints[step] for step in sorted(self.checkpoints)],
            **self._training_by_source(),
            **self._rewards(),
            **({"left_out": self.left_out} if self.left_out else {}),
            **({ONE_STEP_OF: self.every} if self.every > 1 else {}),
        }
        frames: dict[str, Any] = {kind: _frozen(columns) for kind, columns in self._columns.items()}
        return Profile(
            run=self.run,
            source="measured",
            world_size=self.world_size,
            representative={rank: rank for rank in range(self.world_size)},
            capacity_bytes=self.capacity_bytes,
            notes=notes,
            **frames,
        )

    def _by_source(self, step: int) -> dict[str, Any]:
        found = self.evaluation_by_source.get(step)
        return {"by_source": found} if found else {}

    def _training_by_source(self) -> dict[str, Any]:
        """Each source's loss over the tokens of the last steps."""
        tokens: dict[str, int] = {}
        losses: dict[str, float] = {}
        for rows in self.losses_by_source.values():
            for row in rows:
                if row["loss"] is not None:
                    source, count = row["source"], row["tokens"]
                    tokens[source] = tokens.get(source, 0) + count
                    losses[source] = losses.get(source, 0.0) + row["loss"] * count
        found = [
            {"source": source, "loss": losses[source] / count, "tokens": count}
            for source, count in sorted(tokens.items())
            if count
        ]
        return {"loss_by_source": found} if found else {}

    def _take_sources(self, record: dict[str, Any]) -> None:
        if not record.get("by_source"):
            return
        self.losses_by_source[record["step"]] = record["by_source"]
        _forget_old(self.losses_by_source)

    def _rewards(self) -> dict[str, Any]:
        """Means over the last steps of what pairs of answers are worth to the model."""
        steps = list(self.rewards.values())
        means = {name: sum(step[name] for step in steps) / len(steps) for name in REWARDS if steps}
        return {"rewards": means} if means else {}

    def _known(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [record for record in records if record["rank"] < self.world_size]

    def _take(self, record: dict[str, Any]) -> FrameRows:
        kind, rank = record["kind"], record["rank"]
        if kind == "step":
            self._take_sources(record)
            if rewards := rewards_of(record):
                self.rewards[record["step"]] = rewards
                _forget_old(self.rewards)
            return ("steps", [record]), ("memory", self._allocated(record))
        if kind in COLUMNS:
            return ((kind, record["rows"] or []),)
        if kind == "hello":
            self.hello[rank] = record
        elif kind == "phase":
            self.phase[rank] = record["phase"]
        elif kind == "evaluation":
            self.evaluation[record["step"]] = {"loss": record["loss"]} | rewards_of(record)
            if record.get("by_source"):
                self.evaluation_by_source[record["step"]] = record["by_source"]
        elif kind == "checkpoint":
            self.checkpoints[record["step"]] = record["path"]
        return ()

    def _row(self, record: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **values,
            "run": self.run,
            "source": "measured",
            "rank": record["rank"],
            "step": record["step"],
        }

    def _allocated(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """The allocator's count at the end of a step, which every step has; sampled steps have
        more.
        """
        if record["bytes"] is None:
            return []
        stage = self.hello.get(record["rank"], {}).get("stage")
        row = {"stage": stage, "moment": "after_optimizer", "tier": "device", "category": ALLOCATED}
        return [{**row, "bytes": record["bytes"]}]


def rewards_of(record: Mapping[str, Any]) -> dict[str, float]:
    """What a record says of pairs of answers; nothing where it is of text."""
    found = {name: record[name] for name in REWARDS if record.get(name) is not None}
    return found if len(found) == len(REWARDS) else {}


def _forget_old(of_step: dict[int, Any]) -> None:
    """Keep the last `RECENT_STEPS`."""
    if len(of_step) > RECENT_STEPS:
        del of_step[min(of_step)]


def _frozen(columns: Mapping[str, list[Any]]) -> Columns:
    """The columns as they are now: they grow while a frame of them is looked at."""
    now = {name: list(values) for name, values in columns.items()}

    def build() -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(now)

    return Columns(now, len(now["run"]), build)


ROW_COLUMNS = {kind: names[len(SHARED) :] for kind, names in COLUMNS.items()}
"""Frame -> its columns but for `SHARED`."""


@lru_cache(maxsize=4096)
def csv_cell(text: str) -> str:
    """`text` as a cell of CSV, in quotes where it needs them."""
    written = io.StringIO()
    csv.writer(written, lineterminator="").writerow([text, 0])
    return written.getvalue().removesuffix(",0")


def write_frames(found: MeasuredFrames, reader: Reader, folder: Path) -> None:
    """Write all that `reader` has as CSV into `folder`, a part at a time, and what else is known as
    JSON.

    `found` is an empty collection of the run. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        tables = {}
        for kind, names in COLUMNS.items():
            file = stack.enter_context(
                (folder / f"{kind}.csv").open("w", newline="", encoding="utf-8")
            )
            file.write(",".join(names) + "\n")
            tables[kind] = file
        for records in reader.batches():
            for kind, lines in found.lines(records).items():
                tables[kind].writelines(lines)
    found.left_out = reader.left_out
    found.profile().save_description(folder)
