"""Ranks that are slow though they go on: own time of a step against that of their peers.

Ranks of a job end their steps together, so that step times say nothing. A rank's own time is its
compute without its waits: `own_seconds` of a step, on GPUs the spans of timed steps that are no
wait. Peers are the ranks of the same pipeline stage, which have the same work; a rank that has a
stage for itself is held against the others, and against how it stood to them at first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from workbench.safe_io.json_field_checks import number
from workbench.units import seconds_text
from workbench.vocabulary import PHASES_OF_ACTIONS

WARM_UP, WINDOW, LEAST, LEAST_TIMED = 2, 9, 5, 3
"""Steps that are left out at first, that a median is of, and without which nothing is said; the
last of GPUs' timed steps, which are rare.
"""
SLOW, CLEARED = 2.0, 1.5
"""Times its peers' own time from which a rank is slow, and under which it is no longer."""
LARGEST_SHARE = 3.0
"""Times the work of the others that a rank with a stage for itself may have."""
LEAST_SHARE, LEAST_SECONDS = 0.2, 0.02
"""Least cost of a slow rank: this share of the step time, and seconds."""
FEW = 16
"""Ranks whose median one of them moves, which is then left out of it."""


@dataclass
class _RankTimes:
    stage: int | None = None
    on_gpu: bool = False
    seen: int = 0
    own: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    first_share: float | None = None
    """Its own time over that of the others when it was first known."""

    def add(self, own: Mapping[str, Any]) -> None:
        self.seen += 1
        if self.on_gpu or self.seen > WARM_UP:
            self.own.append({name: x for name, x in own.items() if number(x)})

    @property
    def is_known(self) -> bool:
        return len(self.own) >= (LEAST_TIMED if self.on_gpu else LEAST)

    @property
    def total(self) -> float:
        return median(sum(each.values()) for each in self.own)

    @property
    def most_steps(self) -> float:
        """Seconds that three steps of four take at least: a few slow ones do not move it."""
        return sorted(sum(each.values()) for each in self.own)[len(self.own) // 4]

    def phase(self, name: str) -> float:
        return median(each.get(name, 0.0) for each in self.own)


class StragglerWatch:
    """Own times of a run's ranks, from their telemetry."""

    def __init__(self) -> None:
        self._ranks: dict[int, _RankTimes] = {}
        self._slow: dict[int, str] = {}
        """Rank -> what was said when it became slow: figures that change say nothing new."""
        self._changed = False

    def take(self, record: Mapping[str, Any]) -> None:
        """Learn from one telemetry record."""
        rank, kind = record["rank"], record["kind"]
        if kind == "hello":
            on_gpu = not str(record.get("device")).startswith("cpu")
            self._ranks[rank] = _RankTimes(record.get("stage"), on_gpu)
        if (times := self._ranks.get(rank)) is None:
            return
        own = record.get("own_seconds") if kind == "step" else None
        if kind == "step":
            times.seconds.append(record.get("seconds") or 0.0)
        if kind == "timeline" and times.on_gpu:
            own = _own_spans(record["rows"] or [])
        if own:
            times.add(own)
            self._changed = self._changed or rank == min(self._ranks)  # once a step

    def words(self) -> str:
        """Ranks that are slow now, with factor and phase, in words; empty where none is."""
        if self._changed and all(times.is_known for times in self._ranks.values()):
            self._changed = False
            totals = {rank: times.total for rank, times in self._ranks.items()}
            stages: dict[int | None, dict[int, float]] = {}
            for rank, times in self._ranks.items():
                stages.setdefault(times.stage, {})[rank] = totals[rank]
            middle = {stage: median(own.values()) for stage, own in stages.items()}
            found = {}
            for rank, times in self._ranks.items():
                stage = stages[times.stage]
                group = stage if len(stage) > 1 else totals
                of_group = middle[times.stage] if len(stage) > FEW else None
                found[rank] = self._judge(rank, group, of_group, alone=len(stage) == 1)
            self._slow = {rank: text for rank, text in found.items() if text}
        return "; ".join(self._slow.values())

    def _judge(
        self, rank: int, group: Mapping[int, float], usual: float | None, alone: bool
    ) -> str:
        """Words for a slow rank, held against a `group` that it is one of.

        Args:
            rank: The rank.
            group: Own time of a step by rank.
            usual: Median of a group that is not moved by one rank; None: of all but this one.
            alone: Whether the rank has its stage for itself, and the group is all ranks.
        """
        times, peers = self._ranks[rank], [other for other in group if other != rank]
        usual = median(group[peer] for peer in peers) if usual is None and peers else usual
        if not usual:
            return ""
        said = rank in self._slow
        own, limit = (times.total, CLEARED) if said else (times.most_steps, SLOW)
        if alone:
            times.first_share = times.first_share or times.total / usual
            limit *= min(max(times.first_share, 1.0), LARGEST_SHARE)
        least = max(LEAST_SECONDS, LEAST_SHARE * median(times.seconds))
        if own <= limit * usual or own - usual < least:
            return ""
        return self._slow.get(rank) or self._say(rank, peers, times.total, usual)

    def _say(self, rank: int, peers: Sequence[int], own: float, usual: float) -> str:
        times, of_peers = self._ranks[rank], [self._ranks[peer] for peer in peers]
        extra = {
            name: times.phase(name) - median(peer.phase(name) for peer in of_peers)
            for name in times.own[-1]
        }
        most = max(extra, key=extra.__getitem__)
        where = "outside forward, backward and optimizer" if most == "other" else f"in {most}"
        return (
            f"rank {rank} is slow: {seconds_text(own)} of its own a step, {own / usual:.1f} times "
            f"its peers' {seconds_text(usual)}, most of it {where} "
            f"(measured, without waits, median of {len(times.own)} steps); the other ranks wait "
            "for it"
        )


def _own_spans(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by phase of a timed step, without its waits."""
    found: dict[str, float] = {}
    for row in rows:
        if not row["action"].startswith("WAIT"):
            phase = PHASES_OF_ACTIONS.get(row["action"], "other")
            found[phase] = found.get(phase, 0.0) + row["end"] - row["start"]
    return found
