"""How many microbatches of each of its stages a pipeline rank holds, action by action."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from workbench.costmodel.inputs.config import FixedConfig
from workbench.costmodel.inputs.executed_schedule import enough_microbatches, lowered_schedule
from workbench.schedules import Action, Table, Transport, generate, receives_early
from workbench.schedules.table import Row

MOST_RANKS_WITH_TRANSFERS = 16
"""Of a pipeline whose transfers are counted: to lower the table of 64 ranks takes seconds, and what
is between stages is little beside what so many hold.
"""


class Held(NamedTuple):
    """What a rank holds at once of its stages."""

    whole: tuple[int, ...]
    """Microbatches of each stage whose backward is to come."""
    deferred: tuple[int, ...]
    """Those of which only the weight gradient is."""
    inputs: int = 0
    """Inputs that came ahead and outputs on their way."""
    gradients: int = 0
    """The same of gradients."""


HeldCounts = dict[tuple[int, str], tuple[Held, ...]]
"""(which of a rank's stages acts, kind of action) -> what the rank holds at the end of a forward,
or at the start of another action; all that is not at most another.
"""


def counts_transfers(s: FixedConfig) -> bool:
    """Whether `held_counts` has what is between stages: of this engine's own transfers."""
    return s.framework.kernels.counts_operators and s.pipeline <= MOST_RANKS_WITH_TRANSFERS


def held_counts(s: FixedConfig, microbatches: int, alike: Iterable[int]) -> HeldCounts:
    """What any of the pipeline ranks `alike` holds in a step of so many microbatches."""
    transfers = (s.transport, s.pair_groups) if counts_transfers(s) else None
    if s.table is not None:
        every = _of_table(s.table, s.schedule, transfers)
    else:
        enough = enough_microbatches(s, microbatches)
        every = _of_schedule(s.schedule, s.pipeline, enough, s.chunks, transfers)
    own = [every[rank] for rank in alike]
    found = dict.fromkeys(at for counts in own for at in counts)
    return {at: _largest(x for counts in own for x in counts.get(at, ())) for at in found}


@lru_cache(maxsize=64)
def _of_schedule(
    name: str, ranks: int, microbatches: int, chunks: int, transfers: tuple[Transport, bool] | None
) -> tuple[HeldCounts, ...]:
    return tuple(_of_rows(generate(name, ranks, microbatches, chunks), name, transfers))


@lru_cache(maxsize=4)
def _of_table(
    table: Table, name: str, transfers: tuple[Transport, bool] | None
) -> tuple[HeldCounts, ...]:
    return tuple(_of_rows(table, name, transfers))


def _of_rows(
    table: Table, name: str, transfers: tuple[Transport, bool] | None
) -> Iterator[HeldCounts]:
    ends: Iterable[Mapping[Action, int]] = ({} for _ in table.rows)
    if transfers is not None:
        table, ends = lowered_schedule(table, False, receives_early(name), *transfers)
    for rank, (row, sends_end) in enumerate(zip(table.rows, ends)):
        yield _Walk(row, table.stages_of(rank), table.stages, sends_end).run()


@dataclass
class _Walk:
    """A rank's walk along its row of a table, which is lowered where transfers count."""

    row: Row
    own: tuple[int, ...]
    """Stages of the rank."""
    stages: int
    """Of the pipeline."""
    sends_end: Mapping[Action, int]
    """Send -> index in the row of the action before which what it sends is freed."""
    whole: Counter[int] = field(default_factory=Counter)
    deferred: Counter[int] = field(default_factory=Counter)
    between: Counter[str] = field(default_factory=Counter)
    sent: set[Action] = field(default_factory=set)
    found: dict[tuple[int, str], dict[Held, None]] = field(default_factory=dict)

    def run(self) -> HeldCounts:
        """Take every action."""
        transfers = any(action.is_p2p for action in self.row)
        for at, action in enumerate(self.row):
            for send in [x for x in self.sent if self.sends_end[x] <= at]:
                self.sent.discard(send)
                self.between[_passes(send)] -= 1
            if action.is_p2p:
                self._transfer(action)
            elif action.kind in ("F", "B", "I", "W"):
                self._compute(action, transfers)
        return {at: _largest(held) for at, held in self.found.items()}

    def _transfer(self, action: Action) -> None:
        """What is received waits from then on; what is sent does until the send has ended."""
        if action.kind.startswith("RECV"):
            self.between[_passes(action)] += 1
        else:
            self.sent.add(action)

    def _compute(self, action: Action, transfers: bool) -> None:
        stage = action.stage
        forward = action.kind == "F"
        comes, goes = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
        passes = transfers and action.kind != "W"
        self.between[_passes(action)] -= passes and 0 <= comes < self.stages
        self.whole[stage] += forward
        if forward:
            self.between[_passes(action)] += passes and goes < self.stages
        self._see(action)
        self.whole[stage] -= action.kind in ("B", "I")
        self.deferred[stage] += (action.kind == "I") - (action.kind == "W")
        if not forward:
            self.between[_passes(action)] += passes and goes >= 0

    def _see(self, action: Action) -> None:
        held = Held(
            tuple(self.whole[stage] for stage in self.own),
            tuple(self.deferred[stage] for stage in self.own),
            self.between["inputs"],
            self.between["gradients"],
        )
        at = self.own.index(action.stage), action.kind
        self.found.setdefault(at, {})[held] = None


def _passes(action: Action) -> str:
    """What an action receives, sends or makes of another stage."""
    return "inputs" if action.kind in ("F", "RECV_F", "SEND_F") else "gradients"


def _largest(held: Iterable[Held]) -> tuple[Held, ...]:
    """Those that are not at most another in every count."""
    distinct = list(dict.fromkeys(held))
    return tuple(x for x in distinct if not any(y != x and _at_most(x, y) for y in distinct))


def _at_most(x: Held, y: Held) -> bool:
    mine, other = ((*h.whole, *h.deferred, h.inputs, h.gradients) for h in (x, y))
    return all(a <= b for a, b in zip(mine, other))
