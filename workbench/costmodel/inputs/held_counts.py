"""How many microbatches of each of its stages a pipeline rank holds, action by action."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.costmodel.inputs.config import FixedConfig, named_table
from workbench.costmodel.inputs.executed_schedule import enough_microbatches, lowered_schedule
from workbench.schedules import Action, Table, Transport, generate, receives_early

Counts = NDArray[np.int64]
Kinds = NDArray[np.str_]
COMPUTE = ("F", "B", "I", "W")

MOST_RANKS_WITH_TRANSFERS = 8
"""Of a pipeline whose transfers are counted: to lower the table of 64 ranks takes seconds, and what
is between stages is little beside what so many hold.
"""


FILLED = 3
"""Microbatches a rank after which a pipeline with several stages a rank is full: more of them hold
nothing else.
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
    ranks = sum(s.replicas) if s.in_turn else s.pipeline
    return s.framework.kernels.counts_operators and ranks <= MOST_RANKS_WITH_TRANSFERS


def counted_microbatches(s: FixedConfig, microbatches: int) -> int:
    """As few microbatches of a step as show the most that is held."""
    if s.in_turn:
        return enough_microbatches(s, microbatches)
    return min(microbatches, FILLED * s.pipeline)


def held_counts(s: FixedConfig, microbatches: int, alike: tuple[int, ...]) -> HeldCounts:
    """What any of the ranks holds whose rows of the table are `alike`, in a step of so many
    microbatches: on all replicas that take them in turn.
    """
    transfers = (s.transport, s.pair_groups) if counts_transfers(s) else None
    enough = counted_microbatches(s, microbatches)
    if s.table is not None or s.in_turn:
        table = s.table or named_table(s, enough)
        return _of_table(table, s.schedule, transfers, alike)
    return _of_schedule(s.schedule, s.pipeline, enough, s.chunks, transfers, alike)


@lru_cache(maxsize=512)
def _of_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    transfers: tuple[Transport, bool] | None,
    alike: tuple[int, ...],
) -> HeldCounts:
    return _of_ranks(generate(name, ranks, microbatches, chunks), name, transfers, alike)


@lru_cache(maxsize=64)
def _of_table(
    table: Table, name: str, transfers: tuple[Transport, bool] | None, alike: tuple[int, ...]
) -> HeldCounts:
    return _of_ranks(table, name, transfers, alike)


def _of_ranks(
    table: Table, name: str, transfers: tuple[Transport, bool] | None, alike: tuple[int, ...]
) -> HeldCounts:
    ends: Sequence[Mapping[Action, int]] = [{}] * table.ranks
    if transfers is not None:
        table, ends = lowered_schedule(table, False, receives_early(name), *transfers)
    found: dict[tuple[int, str], list[Counts]] = {}
    for rank in alike:
        for at, counts in _seen(table, rank, ends[rank]):
            found.setdefault(at, []).append(counts)
    return {at: _largest(np.concatenate(counts)) for at, counts in found.items()}


def _seen(
    table: Table, rank: int, sends_end: Mapping[Action, int]
) -> Iterator[tuple[tuple[int, str], Counts]]:
    """What a rank holds at each kind of action of its stages: columns as in `Held`."""
    row = table.rows[rank]
    kind, stage = np.array([a.kind for a in row]), np.array([a.stage for a in row])
    before, after = _changes(table, rank, kind, stage)
    sent = [i for i, action in enumerate(row) if action in sends_end]
    ends = np.array([sends_end[row[i]] for i in sent], dtype=int)
    last = ends < len(row)  # others outlive the row
    np.subtract.at(before, (ends[last], _column(kind[sent][last])), 1)
    held = np.cumsum(before, axis=0)
    held[1:] += np.cumsum(after, axis=0)[:-1]
    for place, own in enumerate(table.stages_of(rank)):
        for each in COMPUTE:
            if (at := (stage == own) & (kind == each)).any():
                yield (place, each), np.unique(held[at], axis=0)


def _changes(table: Table, rank: int, kind: Kinds, stage: Counts) -> tuple[Counts, Counts]:
    """What each action changes of what its rank holds, (before, after) what it needs is largest."""
    own, stages = table.stages_of(rank), table.stages
    before, after = (np.zeros((len(kind), 2 * len(own) + 2), dtype=int) for _ in range(2))
    forward, last = kind == "F", np.isin(kind, ("B", "I"))
    for place, each in enumerate(own):
        here = stage == each
        before[:, place] = forward & here
        after[:, place] = -1 * (last & here)
        after[:, len(own) + place] = ((kind == "I") & here) * 1 - ((kind == "W") & here)
    if table.lowered:
        before[:, -2] = forward * ((stage + 1 < stages) * 1 - (stage > 0))
        before[:, -1] = -1 * (last & (stage + 1 < stages))
        after[:, -1] = last & (stage > 0)
        received = np.flatnonzero(np.isin(kind, ("RECV_F", "RECV_B")))
        after[received, _column(kind[received])] += 1
    return before, after


def _column(kinds: Kinds) -> Counts:
    """Of what is between stages: inputs (-2), gradients (-1)."""
    return np.where(np.isin(kinds, ("RECV_F", "SEND_F")), -2, -1)


def _largest(counts: Counts) -> tuple[Held, ...]:
    """Those that are not at most another in every count."""
    distinct = np.unique(counts, axis=0)
    at_most = (distinct[:, None] <= distinct[None]).all(axis=2)
    largest = distinct[at_most.sum(axis=1) == 1].tolist()  # each is at most itself
    stages = (counts.shape[1] - 2) // 2
    return tuple(Held(tuple(x[:stages]), tuple(x[stages:-2]), x[-2], x[-1]) for x in largest)
