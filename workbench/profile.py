"""A Profile: what an instrument says of a plan, as tidy frames with one vocabulary.

Estimate, rehearsal and run all give a Profile, so that a chart, a report or a test need not know
which made it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from workbench.units import (
    bytes_text,
    interval_text,
    loss_text,
    percent_text,
    risk_text,
    seconds_text,
)
from workbench.untrusted_text import escaped
from workbench.vocabulary import ALLOCATED as ALLOCATED
from workbench.vocabulary import CATEGORIES as CATEGORIES
from workbench.vocabulary import COLUMNS as COLUMNS
from workbench.vocabulary import FRAGMENTATION, NOT_ALLOCATED, OUTSIDE, SHOWN_NAMES
from workbench.vocabulary import MEANINGS as MEANINGS
from workbench.vocabulary import MOMENTS as MOMENTS

if TYPE_CHECKING:
    import pandas as pd

Source = Literal["estimated", "rehearsed", "measured"]
T = TypeVar("T")


def frame(kind: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    """A frame of `kind` from rows; columns in the vocabulary's order, absent ones empty."""
    import pandas as pd

    return pd.DataFrame(rows, columns=list(COLUMNS[kind]))


@dataclass(frozen=True)
class Columns:
    """A frame that is not built yet: what its columns hold, and what builds it.

    Importing pandas takes longer than an estimate, and most answers need sums alone.
    """

    columns: Mapping[str, Any]
    """Name -> values, or one value that stands in every row; names may be missing."""
    num_rows: int
    build: Callable[[], pd.DataFrame]

    def column(self, name: str) -> list[Any]:
        """The values of a column, None where it is missing."""
        values = self.columns.get(name)
        if values is None or isinstance(values, str) or not hasattr(values, "__len__"):
            return [values] * self.num_rows
        return values.tolist() if hasattr(values, "tolist") else list(values)


def columns_of(kind: str, columns: Mapping[str, Any], num_rows: int) -> Columns:
    """A frame of `kind` that is built when it is read, in the vocabulary's order of columns."""

    def build() -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(columns, columns=list(COLUMNS[kind]), index=range(num_rows))

    return Columns(columns, num_rows, build)


class _Frame:
    """A field of `Profile` that becomes a DataFrame when it is first read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, profile: None, owner: type) -> Columns: ...

    @overload
    def __get__(self, profile: Profile, owner: type) -> pd.DataFrame: ...

    def __get__(self, profile: Profile | None, owner: type) -> Columns | pd.DataFrame:
        if profile is None:  # what dataclass takes as the field's default
            return Columns({}, 0, lambda: frame(self.name, []))
        stored: Columns | pd.DataFrame = profile.__dict__[self.name]
        if isinstance(stored, Columns):
            stored = profile.__dict__[self.name] = stored.build()
        return stored

    def __set__(self, profile: Profile, value: pd.DataFrame | Columns) -> None:
        profile.__dict__[self.name] = value


@dataclass(repr=False, eq=False)
class Profile:
    """Frames of one instrument on one plan; each is given as a DataFrame, or as `Columns`.

    `memory` is in bytes; `levels` is memory over a step of a rehearsal, in bytes by category after
    so many allocations and releases (`event`); `timeline` is in seconds from the step's start,
    `collectives.bytes` the full tensor's bytes per call and `count` calls per step, `steps.seconds`
    the wall time of a step and `tokens` the whole job's in that step.
    """

    run: str
    source: Source
    world_size: int
    memory: _Frame = _Frame()
    timeline: _Frame = _Frame()
    collectives: _Frame = _Frame()
    steps: _Frame = _Frame()
    levels: _Frame = _Frame()
    representative: dict[int, int] = field(default_factory=dict)
    """Rank -> the rank whose rows stand for it (ranks that do the same are counted once)."""
    capacity_bytes: int | None = None
    """Usable memory of one GPU."""
    host_capacity_bytes: int | None = None
    """A rank's share of its node's host memory; None: not known."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What else the instrument says: step time by part, advice, versions."""

    def rows(self, kind: str, *names: str, **where: str) -> Iterator[tuple[Any, ...]]:
        """The cells of some columns of a frame, row by row; loads no pandas.

        Args:
            kind: A frame: memory, timeline, collectives or steps.
            names: Its columns; a cell that is not known is None or NaN.
            where: Column -> the value that a row must have there.
        """
        stored = self.__dict__[kind]
        if isinstance(stored, Columns):
            cells = zip(*(stored.column(name) for name in (*names, *where)))
            wanted, width = tuple(where.values()), len(names)
            return (row[:width] for row in cells if row[width:] == wanted)
        for name, value in where.items():
            stored = stored[stored[name].to_numpy() == value]
        # Frames that an older version saved lack columns.
        nothing = [None] * len(stored)
        return zip(*(stored[name].tolist() if name in stored else nothing for name in names))

    @property
    def peak_bytes_by_rank(self) -> dict[int, int]:
        """Peak memory by rank: the largest sum at one instant; ranks of which nothing is known are
        left out. On a GPU with what the allocator reserved, and what it does not see, where they
        are known.
        """
        return self._peaks((FRAGMENTATION, OUTSIDE), "max_memory_reserved")

    @property
    def peak_reserved_by_rank(self) -> dict[int, int]:
        """Peak bytes held by torch's allocator, by rank; allocated where it reserves no more."""
        return self._peaks((FRAGMENTATION,), "max_memory_reserved")

    @property
    def peak_allocated_by_rank(self) -> dict[int, int]:
        """Peak bytes that torch's allocator handed out, by rank: all three instruments know it."""
        return self._peaks((), "max_memory_allocated")

    def _peaks(self, beside: tuple[str, ...], counter: str) -> dict[int, int]:
        """Peak bytes allocated by rank, and the categories of `beside` with them.

        Args:
            beside: Of `NOT_ALLOCATED`.
            counter: Column of the measured steps that counts the same without `OUTSIDE`.
        """
        sums: dict[bool, dict[tuple[int, Any], float]] = {True: {}, False: {}}
        more: dict[tuple[int, Any], float] = {}
        outside: dict[int, float] = {}
        at_peak = {"moment": "peak", "tier": "device"}
        for category, rank, step, size in self.rows(
            "memory", "category", "rank", "step", "bytes", **at_peak
        ):
            instant = int(rank), -1 if _is_null(step) else step
            if category in beside:
                more[instant] = more.get(instant, 0) + size
            elif category not in NOT_ALLOCATED:
                of_kind = sums[category == ALLOCATED]
                of_kind[instant] = of_kind.get(instant, 0) + size
            if category == OUTSIDE and category in beside:
                outside[int(rank)] = max(outside.get(int(rank), 0), size)
        peaks: dict[int, int] = {}
        # The allocator's own count, where there is one, is the total: categories are part of it.
        for (rank, step), total in (sums[True] or sums[False]).items():
            total += more.get((rank, step), 0)
            peaks[rank] = max(peaks.get(rank, 0), int(total))
        for rank, size in self.rows("steps", "rank", counter):
            if not _is_null(size):
                peaks[rank] = max(peaks.get(rank, 0), int(size + outside.get(rank, 0)))
        stand_ins = {rank: self.representative.get(rank, rank) for rank in range(self.world_size)}
        return {rank: peaks[stand_in] for rank, stand_in in stand_ins.items() if stand_in in peaks}

    @property
    def by_category(self) -> dict[str, int]:
        """Each category's own maximum over the step, on the rank with the largest peak."""
        peaks = self.peak_bytes_by_rank
        if not peaks:
            return {}
        worst = max(peaks, key=lambda rank: (peaks[rank], -rank))
        worst = self.representative.get(worst, worst)
        found: dict[str, int] = {}
        for rank, category, size in self.rows(
            "memory", "rank", "category", "bytes", moment="maximum", tier="device"
        ):
            if rank == worst and category != ALLOCATED:
                found[str(category)] = max(found.get(str(category), 0), int(size))
        return found

    @property
    def step_seconds(self) -> float | None:
        """Step time: median wall time after the first two (warm-up); null where the instrument has
        no time.
        """
        seconds = self._counted("seconds")
        return float(median(seconds)) if seconds else None

    @property
    def step_time_words(self) -> str:
        """Step time with the steps of which it is the median, where it was measured; empty where
        there is none.
        """
        return step_time_words(self.step_seconds, len(self._counted("seconds")))

    def _counted(self, name: str) -> list[float]:
        """A column of the steps that count for the step time, on the first rank."""
        first = min((rank for (rank,) in self.rows("steps", "rank")), default=None)
        found = (value for rank, value in self.rows("steps", "rank", name) if rank == first)
        return after_warm_up([value for value in found if not _is_null(value)])

    @property
    def cpu_seconds(self) -> float | None:
        """CPU seconds of a step of CPU ranks, all ranks and their threads together, where waiting
        costs nothing: the median as for `step_seconds`; null where that is unknown.
        """
        if "cpu_seconds" in self.notes:
            return float(self.notes["cpu_seconds"])
        by_step: dict[float, list[float]] = {}
        for step, used in self.rows("steps", "step", "cpu_seconds"):
            if not _is_null(used):
                by_step.setdefault(step, []).append(used)
        sums = [sum(by_step[s]) for s in sorted(by_step) if len(by_step[s]) == self.world_size]
        sums = after_warm_up(sums)
        return float(median(sums)) if sums else None

    @property
    def data_share(self) -> float | None:
        """Share of the step time that steps waited for their batch, after the first two, on the
        rank that waited most; null where that is unknown.
        """
        by_rank: dict[int, list[tuple[float, float]]] = {}
        for rank, waited, seconds in self.rows("steps", "rank", "data_seconds", "seconds"):
            if not (_is_null(waited) or _is_null(seconds)):
                by_rank.setdefault(int(rank), []).append((waited, seconds))
        shares = []
        for steps in by_rank.values():
            steps = after_warm_up(steps)
            if whole := sum(seconds for _, seconds in steps):
                shares.append(sum(waited for waited, _ in steps) / whole)
        return max(shares, default=None)

    @property
    def step_interval(self) -> tuple[float, float] | None:
        """Seconds between which nine of ten steps lie, of an estimate; null elsewhere."""
        ends = self.notes.get("step_seconds_90")
        return (float(ends[0]), float(ends[1])) if ends else None

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput of the whole job, tokens/s, from the median step."""
        seconds = self.step_seconds
        return self.step_tokens / seconds if self.step_tokens and seconds else None

    @property
    def step_tokens(self) -> float:
        """Tokens of a step of the whole job, of the median step; 0 where that is unknown."""
        tokens = self._counted("tokens")
        return float(median(tokens)) if tokens else 0.0

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, of the rank and step with most."""
        sums: dict[tuple[Any, Any], float] = {}
        for rank, step, size in self.rows(
            "memory", "rank", "step", "bytes", tier="host", moment="maximum"
        ):
            sums[rank, step] = sums.get((rank, step), 0.0) + size
        return int(max(sums.values(), default=0.0))

    @property
    def exceeds_host(self) -> bool:
        """Whether a rank needs more host memory than its share of a node's."""
        return self.host_capacity_bytes is not None and self.host_bytes > self.host_capacity_bytes

    @property
    def fits(self) -> bool | None:
        """Whether every rank's peak is within one GPU's memory, and what it offloads within its
        share of the host's; null where the peak or the capacity is unknown.
        """
        peaks = self.peak_bytes_by_rank
        if not peaks or not self.capacity_bytes:
            return None
        if max(peaks.values()) > self.capacity_bytes or self.exceeds_host:
            return False
        return True if len(peaks) == self.world_size else None

    @property
    def out_of_memory_risk(self) -> float | None:
        """Probability that an estimated plan runs out of memory; None where none is known."""
        found: float | None = self.notes.get("memory", {}).get("probability_of_running_out")
        return found

    @property
    def risk_words(self) -> str:
        """That probability in words; empty where none is known."""
        risk = self.out_of_memory_risk
        return "" if risk is None else f"out-of-memory risk {risk_text(risk)}"

    @property
    def unfit_words(self) -> str:
        """Words for times and rates that no step can have; empty where one can."""
        unfit = self.fits is False and self.source != "measured"
        return "of a plan that does not fit" if unfit else ""

    @property
    def source_words(self) -> str:
        """Source of its times and rates, with what they are of."""
        return ", ".join(filter(None, (self.source, self.unfit_words)))

    @property
    def advice(self) -> str:
        """The smallest change that makes an estimated plan fit, in words; empty where it fits or
        none is known.
        """
        found = self.notes.get("advice")
        if isinstance(found, Mapping):
            return f"{found['field']} from {found['from']} to {found['to']}"
        return str(found or "")

    @property
    def loss(self) -> list[float | None]:
        """Training loss by step, None where it was not finite; empty where none was measured."""
        rows = list(self.rows("steps", "rank", "step", "loss")) if self.source == "measured" else []
        first = min((rank for rank, _, _ in rows), default=None)
        known = [(step, x) for rank, step, x in rows if rank == first]
        known.sort(key=lambda row: row[0])
        return [None if _is_null(x) else float(x) for _, x in known]

    @property
    def skipped_steps(self) -> int | None:
        """Steps that loss scaling skipped, whose gradients were not finite; None without it."""
        rows = list(self.rows("steps", "rank", "loss_scale", "skipped"))
        first = min((rank for rank, _, _ in rows), default=None)
        found = [bool(s) for rank, scale, s in rows if rank == first and not _is_null(scale)]
        return sum(found) if found else None

    @property
    def skipped_text(self) -> str:
        """Number of steps that loss scaling skipped, of all; empty where none."""
        skipped = self.skipped_steps
        return f"{skipped} of {len(self.loss)}" if skipped else ""

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
            "cpu_seconds": self.cpu_seconds,
            "tokens_per_second": self.tokens_per_second,
            "fits": self.fits,
            **({} if self.data_share is None else {"data_share": self.data_share}),
            **({} if self.skipped_steps is None else {"skipped_steps": self.skipped_steps}),
            **self.notes,
            "memory": memory,
        }

    def facts(self) -> dict[str, str]:
        """What a person asks first, in words."""
        peaks = self.peak_bytes_by_rank
        facts = {"instrument": self.source, "ranks": str(self.world_size)}
        if peaks:
            facts["peak memory (max rank)"] = bytes_text(max(peaks.values()))
        if self.capacity_bytes:
            facts["GPU memory"] = bytes_text(self.capacity_bytes)
        if self.host_capacity_bytes and self.host_bytes:
            share, host = bytes_text(self.host_capacity_bytes), bytes_text(self.host_bytes)
            facts["host memory (max rank)"] = f"{host} of {share}"
        if self.fits is not None:
            facts["fits"] = ", ".join(filter(None, ("yes" if self.fits else "no", self.risk_words)))
        if not self.unfit_words:
            facts |= self._time_facts()
        if self.loss:
            facts["loss, first and last"] = f"{loss_text(self.loss[0])}, {loss_text(self.loss[-1])}"
        if self.skipped_text:
            facts["steps skipped"] = f"{self.skipped_text}: gradients not finite in fp16"
        if left_out := self.notes.get("left_out"):
            facts["left out"] = "; ".join(left_out)
        return facts

    def _time_facts(self) -> dict[str, str]:
        """Time of a step, in words."""
        facts = {"step time": self.step_time_words} if self.step_seconds is not None else {}
        if self.step_interval is not None:
            facts["step time, 90 % interval"] = interval_text(self.step_interval)
        if self.cpu_seconds is not None:
            facts["CPU seconds of a step"] = f"{self.cpu_seconds:.4g} (all ranks)"
        if self.data_share is not None:
            facts["data loading"] = f"{percent_text(self.data_share)} of the step time"
        if self.tokens_per_second is not None:
            facts["tokens/s"] = f"{self.tokens_per_second:,.0f}"
        if assumed := self.notes.get("uncalibrated"):
            facts["times are"] = assumed
        return facts

    def __repr__(self) -> str:
        return f"<Profile of {self.run}: {', '.join(f'{k} {v}' for k, v in self.facts().items())}>"

    def _repr_html_(self) -> str:
        rows = [(name, value, "") for name, value in self.facts().items()]
        rows += [
            (
                f"{SHOWN_NAMES.get(category, category)}, peak",
                bytes_text(size),
                MEANINGS.get(category, ""),
            )
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
            "host_capacity_bytes": self.host_capacity_bytes,
            "notes": self.notes,
        }
        (folder / "profile.json").write_text(json.dumps(rest))

    @classmethod
    def read(cls, folder: Path) -> Profile:
        """Read what `save` wrote."""
        rest = json.loads((folder / "profile.json").read_text())
        rest["representative"] = {int(k): v for k, v in rest["representative"].items()}
        import pandas as pd

        frames: dict[str, Any] = {
            kind: pd.read_csv(path)
            for kind in COLUMNS
            if (path := folder / f"{kind}.csv").exists()  # an older version saved fewer
        }
        return cls(**rest, **frames)


def batches_differ(profiles: Sequence[Profile]) -> bool:
    """True where steps of one instrument hold different numbers of tokens: then throughput compares
    them, step time does not.
    """
    by_source: dict[str, list[float]] = {}
    for profile in profiles:
        if tokens := profile.step_tokens:
            by_source.setdefault(profile.source, []).append(tokens)
    return any(max(found) > SAME_BATCH * min(found) for found in by_source.values())


SAME_BATCH = 1.01
"""Times as many tokens up to which steps of one instrument hold as many."""
WARM_UP_STEPS, LEAST_STEPS = 2, 5
"""First steps of a run that do not count for its step time, where it has at least so many."""


def after_warm_up(steps: list[T]) -> list[T]:
    """The steps of a run that count for its step time."""
    return steps[WARM_UP_STEPS:] if len(steps) >= LEAST_STEPS else steps


def step_time_words(seconds: float | None, steps: int) -> str:
    """A measured step time and the number of `steps` that it is the median of: '307 ms (median of
    28 steps)'.
    """
    if seconds is None:
        return ""
    return seconds_text(seconds) + (f" (median of {steps} steps)" if steps > 1 else "")


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
