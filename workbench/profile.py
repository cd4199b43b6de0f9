"""A Profile: what an instrument says of a plan, as tidy frames with one vocabulary.

Estimate, rehearsal and run all give a Profile, so that a chart, a report or a test need not know
which made it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from workbench.untrusted_text import escaped
from workbench.vocabulary import ALLOCATED as ALLOCATED
from workbench.vocabulary import CATEGORIES as CATEGORIES
from workbench.vocabulary import COLUMNS as COLUMNS
from workbench.vocabulary import MEANINGS as MEANINGS
from workbench.vocabulary import MOMENTS as MOMENTS

Source = Literal["estimated", "rehearsed", "measured"]


def frame(kind: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    """A frame of `kind` from rows; columns in the vocabulary's order, absent ones empty."""
    return pd.DataFrame(rows, columns=list(COLUMNS[kind]))


@dataclass(repr=False)
class Profile:
    """Frames of one instrument on one plan.

    `memory` is in bytes, `timeline` in seconds from the step's start, `collectives.bytes` the full
    tensor's bytes a call and `count` calls a step, `steps.seconds` the wall time of a step and
    `tokens` the whole job's in that step.
    """

    run: str
    source: Source
    world_size: int
    memory: pd.DataFrame = field(default_factory=lambda: frame("memory", []))
    timeline: pd.DataFrame = field(default_factory=lambda: frame("timeline", []))
    collectives: pd.DataFrame = field(default_factory=lambda: frame("collectives", []))
    steps: pd.DataFrame = field(default_factory=lambda: frame("steps", []))
    representative: dict[int, int] = field(default_factory=dict)
    """Rank -> the rank whose rows stand for it (ranks that do the same are counted once)."""
    capacity_bytes: int | None = None
    """Usable memory of one card."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What else the instrument says: step time by part, advice, versions."""

    @property
    def peak_bytes_by_rank(self) -> dict[int, int]:
        """Largest sum at one instant, by rank; ranks of which nothing is known are left out."""
        rows = self.memory
        here = (rows.moment.to_numpy() == "peak") & (rows.tier.to_numpy() == "device")
        counted = here & (rows.category.to_numpy() == ALLOCATED)
        here = counted if counted.any() else here
        sums: dict[tuple[int, float], float] = {}
        for rank, step, size in zip(
            *(rows[name].to_numpy()[here].tolist() for name in ("rank", "step", "bytes"))
        ):
            instant = int(rank), -1 if step is None or step != step else step
            sums[instant] = sums.get(instant, 0) + size
        peaks: dict[int, int] = {}
        for (rank, _), total in sums.items():
            peaks[rank] = max(peaks.get(rank, 0), int(total))
        stand_ins = {rank: self.representative.get(rank, rank) for rank in range(self.world_size)}
        return {rank: peaks[stand_in] for rank, stand_in in stand_ins.items() if stand_in in peaks}

    @property
    def by_category(self) -> dict[str, int]:
        """Each category's own maximum over the step, on the rank with the largest peak."""
        peaks = self.peak_bytes_by_rank
        if not peaks:
            return {}
        worst = max(peaks, key=lambda rank: (peaks[rank], -rank))
        rows = self.memory[(self.memory["rank"] == self.representative.get(worst, worst))]
        rows = rows[
            (rows.tier == "device") & (rows.category != ALLOCATED) & (rows.moment == "maximum")
        ]
        return {str(k): int(v) for k, v in rows.groupby("category", sort=False).bytes.max().items()}

    @property
    def step_seconds(self) -> float | None:
        """Median wall time of a step after the first two (warm-up); null where the instrument has
        no time.
        """
        rows = self.steps[(self.steps["rank"] == self.steps["rank"].min())].seconds.dropna()
        rows = rows[2:] if len(rows) > 4 else rows
        return float(rows.median()) if len(rows) else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the whole job a second, from the median step."""
        tokens = self.steps.tokens.dropna()
        seconds = self.step_seconds
        return float(tokens.median()) / seconds if len(tokens) and seconds else None

    @property
    def fits(self) -> bool | None:
        """Whether every rank's peak is within one card's memory; null where that, or the capacity,
        is unknown.
        """
        peaks = self.peak_bytes_by_rank
        if not peaks or not self.capacity_bytes:
            return None
        if max(peaks.values()) > self.capacity_bytes:
            return False
        return True if len(peaks) == self.world_size else None

    @property
    def loss(self) -> list[float]:
        """Training loss by step."""
        rows = self.steps[self.steps["rank"] == self.steps["rank"].min()]
        return [float(x) for x in rows.sort_values("step").loss.dropna()]

    def summary(self) -> dict[str, Any]:
        """The answer for machines: the keys that `--json` prints; what notes say of memory stands
        with it.
        """
        memory = {
            "peak_bytes_by_rank": {str(k): v for k, v in self.peak_bytes_by_rank.items()},
            "by_category": self.by_category,
            **self.notes.get("memory", {}),
        }
        return {
            "source": self.source,
            "run": self.run,
            "world_size": self.world_size,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "fits": self.fits,
            **self.notes,
            "memory": memory,
        }

    def facts(self) -> dict[str, str]:
        """What a person asks first, in words."""
        peaks = self.peak_bytes_by_rank
        told = {"instrument": self.source, "ranks": str(self.world_size)}
        if peaks:
            told["fullest rank"] = f"{max(peaks.values()) / 2**20:,.1f} MiB"
        if self.capacity_bytes:
            told["one card"] = f"{self.capacity_bytes / 2**20:,.1f} MiB"
        if self.fits is not None:
            told["fits"] = "yes" if self.fits else "no"
        if self.step_seconds is not None:
            told["a step"] = f"{self.step_seconds:.4g} s"
        if self.tokens_per_second is not None:
            told["tokens a second"] = f"{self.tokens_per_second:,.0f}"
        if assumed := self.notes.get("uncalibrated"):
            told["its time"] = assumed
        if self.loss:
            told["loss, first and last"] = f"{self.loss[0]:.4f}, {self.loss[-1]:.4f}"
        if left_out := self.notes.get("left_out"):
            told["left out"] = "; ".join(left_out)
        return told

    def __repr__(self) -> str:
        return f"<Profile of {self.run}: {', '.join(f'{k} {v}' for k, v in self.facts().items())}>"

    def _repr_html_(self) -> str:
        rows = [(name, value, "") for name, value in self.facts().items()]
        rows += [
            (f"{category}, at most", f"{size / 2**20:,.1f} MiB", MEANINGS.get(category, ""))
            for category, size in self.by_category.items()
        ]
        body = "".join(
            f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows
        )
        return f"<b>{escaped(self.run)}</b><table>{body}</table>"

    def save(self, folder: Path) -> None:
        """Write the frames as CSV and the rest as JSON into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for kind in COLUMNS:
            getattr(self, kind).to_csv(folder / f"{kind}.csv", index=False)
        self.save_description(folder)

    def save_description(self, folder: Path) -> None:
        """Write what stands beside the frames as JSON into `folder`."""
        rest = {
            "run": self.run,
            "source": self.source,
            "world_size": self.world_size,
            "representative": self.representative,
            "capacity_bytes": self.capacity_bytes,
            "notes": self.notes,
        }
        (folder / "profile.json").write_text(json.dumps(rest))

    @classmethod
    def read(cls, folder: Path) -> Profile:
        """Read what `save` wrote."""
        rest = json.loads((folder / "profile.json").read_text())
        rest["representative"] = {int(k): v for k, v in rest["representative"].items()}
        frames: dict[str, Any] = {kind: pd.read_csv(folder / f"{kind}.csv") for kind in COLUMNS}
        return cls(**rest, **frames)
