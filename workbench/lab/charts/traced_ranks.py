"""Traced steps of a run by part: which step stands for them, and which ranks are drawn of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Any, NamedTuple

from workbench.lab import palette
from workbench.lab.rank_selection import int_or_none
from workbench.units import digits, seconds_text

LAST_TRACED = 100
"""Traced steps of a long run that count: the last ones."""
IDLE = "idle"
"""Time of a traced rank without an action."""


class Part(NamedTuple):
    """A part of a step; `detail` says what it adds up, in words."""

    name: str
    seconds: float
    detail: str = ""


@dataclass
class _RankSpans:
    """Spans of one rank in one step."""

    stages: set[int] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    """Action -> seconds."""
    end: float = 0.0

    @property
    def own(self) -> float:
        """Seconds of its own: all but its waits, for peers end a step together."""
        return sum(s for action, s in self.seconds.items() if not action.startswith("WAIT"))


class TracedSteps:
    """Seconds by action of the steps of which a timeline was recorded, as they come."""

    def __init__(self) -> None:
        self.steps: dict[int | None, dict[int, _RankSpans]] = {}

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of a timeline, each step of a rank once."""
        for row in rows:
            ranks = self.steps.setdefault(int_or_none(row["step"]), {})
            own = ranks.setdefault(int(row["rank"]), _RankSpans())
            if (stage := int_or_none(row["stage"])) is not None:
                own.stages.add(stage)
            action = str(row["action"])
            own.seconds[action] = own.seconds.get(action, 0.0) + row["end"] - row["start"]
            own.end = max(own.end, row["end"])
        # By number: a history comes rank after rank, so that old steps come late.
        for step in sorted(self.steps, key=lambda step: step or 0)[:-LAST_TRACED]:
            del self.steps[step]

    @property
    def number(self) -> int:
        """Steps of which one is drawn."""
        return len(self._complete())

    def shown_ranks(self) -> list[tuple[str, list[Part]]]:
        """Words and parts of each rank that is drawn, of the step with the median length: the rank
        with the median time of its own among its peers, and the slowest, with its factor. Own
        times are medians of all traced steps: one step may be anybody's.
        """
        ranks, steps = self._median_step(), self._complete()
        if len(ranks) == 1:
            return [("", self._parts(*ranks))]
        own = {rank: median(step[rank].own for step in steps if rank in step) for rank in ranks}
        middle = {rank: _median_rank(self._peers(rank, ranks), own) for rank in ranks}
        factors = {rank: own[rank] / (own[middle[rank]] or 1.0) for rank in ranks}
        slowest = max(sorted(ranks), key=factors.__getitem__)
        usual = middle[slowest]
        found = [(f", median rank {usual}", self._parts(usual))]
        if slowest != usual:
            words = f", slowest rank {slowest} ({digits(factors[slowest], 2)}×)"
            found.append((words, self._parts(slowest)))
        return found

    def _complete(self) -> list[dict[int, _RankSpans]]:
        """Steps of which the most ranks have a timeline."""
        most = max(map(len, self.steps.values()))
        return [ranks for ranks in self.steps.values() if len(ranks) == most]

    def _median_step(self) -> dict[int, _RankSpans]:
        steps = self._complete()
        lengths = [max(own.end for own in ranks.values()) for ranks in steps]
        return steps[lengths.index(median_low(lengths))]

    def _peers(self, rank: int, ranks: Mapping[int, _RankSpans]) -> list[int]:
        """Ranks of the same stages, which have the same work; all where it has them for itself."""
        same = [one for one, own in ranks.items() if own.stages == ranks[rank].stages]
        return same if len(same) > 1 else list(ranks)

    def _parts(self, rank: int) -> list[Part]:
        """The parts of one rank, to the end of the step."""
        ranks = self._median_step()
        own, end = ranks[rank], max(each.end for each in ranks.values())
        rest = end - sum(own.seconds.values())
        stages = set().union(*(each.stages for each in ranks.values()))
        whole = {**own.seconds, IDLE: rest} if rest > 0 else own.seconds
        found: dict[tuple[str, str], float] = {}
        for action, seconds in whole.items():
            title = action if action == IDLE else palette.action_style(action)[0]
            key = palette.part_of_action(action, len(stages) > 1), title
            found[key] = found.get(key, 0.0) + seconds
        return common_parts(
            [Part(part, s, f"{title} {seconds_text(s)}") for (part, title), s in found.items() if s]
        )


def _median_rank(peers: Sequence[int], own: Mapping[int, float]) -> int:
    order = sorted(peers, key=lambda rank: (own[rank], rank))
    return order[(len(order) - 1) // 2]


def common_parts(parts: Sequence[Part]) -> list[Part]:
    """The parts that every instrument knows, in their order; what each adds up is its detail."""
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(palette.COMMON_PARTS.get(part.name, part.name), []).append(part)
    return [
        Part(name, sum(part.seconds for part in own), _detail(name, own))
        for name, own in sorted(found.items(), key=lambda one: palette.step_part_order(one[0]))
    ]


def _detail(name: str, parts: Sequence[Part]) -> str:
    """Words for what is added up to the part `name`; none where that is all it says."""
    if [(part.name, part.detail) for part in parts] == [(name, "")]:
        return ""
    words = (
        p.detail or f"{palette.step_part_label(p.name)} {seconds_text(p.seconds)}" for p in parts
    )
    return ", ".join(words)
