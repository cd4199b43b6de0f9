"""How many microbatches of each of its stages a pipeline rank holds, action by action."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property, lru_cache
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.corpora.token_cache import cache_folder, made_private, write_whole
from workbench.costmodel.inputs.config import FixedConfig, named_table
from workbench.costmodel.inputs.executed_schedule import enough_microbatches, lowered_schedule
from workbench.schedules import Action, Table, Transport, generate, receives_early
from workbench.schedules.action import RECVS
from workbench.schedules.table import Row

Counts = NDArray[np.int64]
COMPUTE = ("F", "B", "I", "W")
_NUMBERS = {kind: number for number, kind in enumerate((*COMPUTE, *RECVS))}
_BETWEEN = {"RECV_F": -2, "SEND_F": -2, "RECV_B": -1, "SEND_B": -1}
"""Column of what a transfer has."""

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


Largest = Sequence[tuple[int, list[list[int]]]]
"""(number of a stage's kind of action, what is held: numbers as in `Held`, one after the other)."""
MOST_KEPT = 20_000
"""Counts that a file holds, of some 650 bytes each: of thirty spaces."""
_KEPT: dict[str, Largest] = {}
"""Arguments of `_of_schedule` -> what it counted."""
_WRITTEN: set[str] = set()


class HeldCounts(dict[tuple[int, str], tuple[Held, ...]]):
    """(which of a rank's stages acts, kind of action) -> what the rank holds at the end of a
    forward, or at the start of another action; all that is not at most another.
    """

    @cached_property
    def stacked(self) -> tuple[NDArray[np.float64], list[int]]:
        """(a row of numbers for each that is held, the first row of each action)."""
        held = [
            (*x.whole, *x.deferred, x.inputs, x.gradients) for own in self.values() for x in own
        ]
        starts = accumulate(map(len, self.values()), initial=0)
        return np.array(held, dtype=float), list(starts)[:-1]


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


@lru_cache(maxsize=4096)  # a wide search asks for some 700
def _of_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    transfers: tuple[Transport, bool] | None,
    alike: tuple[int, ...],
) -> HeldCounts:
    key = json.dumps([name, ranks, microbatches, chunks, transfers, alike])
    if key not in _KEPT:
        table = generate(name, ranks, microbatches, chunks)
        _KEPT[key] = _of_ranks(table, name, transfers, alike)
    return _held_counts(_KEPT[key])


@lru_cache(maxsize=64)
def _of_table(
    table: Table, name: str, transfers: tuple[Transport, bool] | None, alike: tuple[int, ...]
) -> HeldCounts:
    return _held_counts(_of_ranks(table, name, transfers, alike))


@cache
def read_kept_counts() -> None:
    """Read what searches before this process counted of named schedules, with the very same code:
    to count for a wide search takes as long as all else of it.
    """
    with suppress(OSError, ValueError):
        code, checksum, text = _kept_file().read_text("utf-8").split("\n", 2)
        if (code, checksum) == (_digest_of_code(), sha256(text.encode()).hexdigest()):
            _KEPT.update(json.loads(text))
    _WRITTEN.update(_KEPT)


def write_kept_counts() -> None:
    """Write them for the next process, if there are new ones and the folder may be written."""
    if len(_WRITTEN) < len(_KEPT) <= MOST_KEPT:
        text = json.dumps(_KEPT, separators=(",", ":"))
        with suppress(OSError):
            made_private(_kept_file().parent)
            checksum = sha256(text.encode()).hexdigest()
            write_whole(_kept_file(), f"{_digest_of_code()}\n{checksum}\n{text}")
            _WRITTEN.update(_KEPT)


def _kept_file() -> Path:
    return cache_folder("schedules") / "held_counts"


@cache
def _digest_of_code() -> str:
    """Digest of all code that decides what a rank holds: other code counts anew."""
    package = Path(__file__).parents[2]
    files = [
        *sorted(package.glob("schedules/**/*.py")),
        *sorted(Path(__file__).parent.glob("*.py")),
    ]
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _of_ranks(
    table: Table, name: str, transfers: tuple[Transport, bool] | None, alike: tuple[int, ...]
) -> Largest:
    ends: Sequence[Mapping[Action, int]] = [{}] * table.ranks
    if transfers is not None:
        table, ends = lowered_schedule(table, False, receives_early(name, transfers[0]), *transfers)
    rows = [table.rows[rank] for rank in alike]
    kind = np.array([_NUMBERS.get(action.kind, -1) for row in rows for action in row])
    stage = np.array([action.stage for row in rows for action in row])
    place = np.array(table.places)[stage]
    held = _held(table, rows, [ends[rank] for rank in alike], kind, stage, place)
    acts = (kind >= 0) & (kind < len(COMPUTE))
    return _largest(place[acts] * len(COMPUTE) + kind[acts], held[acts])


def _held(
    table: Table,
    rows: Sequence[Row],
    ends: Sequence[Mapping[Action, int]],
    kind: Counts,
    stage: Counts,
    place: Counts,
) -> Counts:
    """Counts that a rank holds at each action of some rows, row after row: columns as in `Held`."""
    starts = np.cumsum([0, *map(len, rows)])
    before, after = _changes(table, kind, stage, place)
    for start, row, sends_end in zip(starts, rows, ends):
        for action, end in sends_end.items():
            if end < len(row):  # others outlive the row
                before[start + end, _BETWEEN[action.kind]] -= 1
    held = np.cumsum(before, axis=0)
    held[1:] += np.cumsum(after, axis=0)[:-1]
    left = np.vstack([np.zeros_like(held[:1]), (held + after)[starts[1:-1] - 1]])
    return np.asarray(held - np.repeat(left, np.diff(starts), axis=0))


def _changes(table: Table, kind: Counts, stage: Counts, place: Counts) -> tuple[Counts, Counts]:
    """What each action changes of what its rank holds, (before, after) what it needs is largest."""
    chunks = max(table.places) + 1
    before, after = (np.zeros((len(kind), 2 * chunks + 2), dtype=int) for _ in range(2))
    forward, backward, is_input, weight = (kind == _NUMBERS[each] for each in COMPUTE)
    last = backward | is_input
    at = np.arange(len(kind))
    before[at, place] = forward
    after[at, place] = -1 * last
    after[at, chunks + place] = is_input * 1 - weight
    if table.lowered:
        before[:, -2] = forward * ((stage + 1 < table.stages) * 1 - (stage > 0))
        before[:, -1] = -1 * (last & (stage + 1 < table.stages))
        after[:, -1] = last & (stage > 0)
        for each in RECVS:
            after[kind == _NUMBERS[each], _BETWEEN[each]] += 1
    return before, after


def _largest(at: Counts, held: Counts) -> Largest:
    """Those that are not at most another in every count, of each of `at`: the one of largest sum is
    none's, time after time, of what is not at most those before.
    """
    order = np.lexsort((-held.sum(axis=1), at))
    at, held = at[order], held[order]
    found: dict[int, list[list[int]]] = {}
    while len(at):
        first = np.r_[True, at[1:] != at[:-1]]
        for number, counts in zip(at[first].tolist(), held[first].tolist()):
            found.setdefault(number, []).append(counts)
        others = (held > held[first][np.cumsum(first) - 1]).any(axis=1)
        at, held = at[others], held[others]
    return [(number, sorted(largest)) for number, largest in sorted(found.items())]


def _held_counts(found: Largest) -> HeldCounts:
    stages = (len(found[0][1][0]) - 2) // 2
    return HeldCounts(
        {
            (number // len(COMPUTE), COMPUTE[number % len(COMPUTE)]): tuple(
                Held(tuple(x[:stages]), tuple(x[stages:-2]), x[-2], x[-1]) for x in largest
            )
            for number, largest in found
        }
    )
