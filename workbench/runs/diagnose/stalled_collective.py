"""Which rank a stalled collective waits for, by what each rank entered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from workbench.runs.diagnose.flight_recorder import Call, Dump


@dataclass(frozen=True)
class Stall:
    """What the ranks' dumps say together.

    Attributes:
        rank: The rank that the others wait for; None where all entered the same call.
        message: What happened, in words.
        network: Whether all ranks are in the same call, and the GPUs or their links do not get on
            with it.
    """

    rank: int | None
    message: str
    network: bool = False


def find_stall(dumps: Mapping[int, Dump]) -> Stall | None:
    """The rank at the end of all waiting; None where no rank waits.

    A rank waits for those of its group that have not entered the call that it is in, or have not
    dumped anything; who is waited for, and waits for nobody, holds all.
    """
    calls = {rank: dump.waiting for rank, dump in dumps.items()}
    waiting = {rank: call for rank, call in calls.items() if call is not None}
    if not waiting:
        return None
    for call in waiting.values():
        if (found := _mismatch(call, dumps)) is not None:
            return found
    awaited = {rank: set(_awaited(call, dumps)) for rank, call in waiting.items()}
    blocking = set().union(*awaited.values())
    free = [rank for rank in blocking if not awaited.get(rank)]
    if free:
        # A dump proves what its rank did not enter; a rank without one may only have lost it.
        first = min(
            free,
            key=lambda rank: (-sum(rank in w for w in awaited.values()), rank not in dumps, rank),
        )
        return Stall(first, _absent(first, waiting, awaited, dumps))
    if blocking:
        return _circle(waiting, awaited, dumps)
    return _all_entered(waiting, dumps)


def _awaited(call: Call, dumps: Mapping[int, Dump]) -> Iterator[int]:
    """Ranks that `call` waits for."""
    if call.peer is not None:
        other = dumps.get(call.peer)
        if other is None or not any(
            not c.done and c.group == call.group and c.peer == call.rank and c.what != call.what
            for c in other.calls
        ):
            yield call.peer
        return
    for rank in dumps[call.rank].members.get(call.group, ()):
        if rank != call.rank and (
            rank not in dumps or not dumps[rank].has_entered(call.group, call.sequence)
        ):
            yield rank


def _mismatch(call: Call, dumps: Mapping[int, Dump]) -> Stall | None:
    """Another rank that entered another collective in its place."""
    if call.peer is not None:
        return None
    for rank in dumps[call.rank].members.get(call.group, ()):
        other = dumps[rank].call(call.group, call.sequence) if rank in dumps else None
        if other is not None and other.what != call.what:
            return Stall(
                rank,
                f"rank {rank} is in {other.what}{_at(other)} where rank {call.rank} is in "
                f"{_named(call, dumps)}{_at(call)}: ranks call collectives in different order",
            )
    return None


def _absent(
    rank: int,
    waiting: Mapping[int, Call],
    awaited: Mapping[int, set[int]],
    dumps: Mapping[int, Dump],
) -> str:
    held = [other for other, ranks in awaited.items() if rank in ranks]
    call = waiting[held[0]]
    same = [
        o for o in held if (waiting[o].group, waiting[o].sequence) == (call.group, call.sequence)
    ]
    entered = "did not enter" if rank in dumps else "left no record of its calls, as of"
    message = f"rank {rank} {entered} {_named(call, dumps)}, in which {_ranks(same)}"
    if rank in dumps and dumps[rank].calls:
        last = dumps[rank].calls[-1]
        message += f"; its last call was {_named(last, dumps)}{_at(last)}"
    return message


def _circle(
    waiting: Mapping[int, Call], awaited: Mapping[int, set[int]], dumps: Mapping[int, Dump]
) -> Stall:
    rank = min(rank for ranks in awaited.values() for rank in ranks)
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = min(awaited[rank])
    ring = seen[seen.index(rank) :]
    each = ", ".join(f"rank {r} in {_named(waiting[r], dumps)}{_at(waiting[r])}" for r in ring)
    return Stall(ring[0], f"ranks wait for each other: {each}")


def _all_entered(waiting: Mapping[int, Call], dumps: Mapping[int, Dump]) -> Stall:
    call = waiting[min(waiting)]
    return Stall(
        None,
        f"every rank entered {_named(call, dumps)}, and it does not complete: the GPUs or their "
        "links do not get on with it",
        network=True,
    )


def _named(call: Call, dumps: Mapping[int, Dump]) -> str:
    """`all-reduce 418 of the tensor group of ranks 0, 1`."""
    dump = dumps[call.rank]
    described, members = dump.described.get(call.group, ""), dump.members.get(call.group, ())
    whose = "" if described in ("", "undefined", "default_pg") else f"{described} "
    few = ", ".join(map(str, members)) if len(members) <= 8 else f"{members[0]} to {members[-1]}"
    group = f"the {whose}group of ranks {few}" if members else f"process group {call.group}"
    if call.peer is not None:
        return f"{call.what} {'to' if call.what == 'send' else 'from'} rank {call.peer} in {group}"
    return f"{call.what} {call.sequence} of {group}"


def _at(call: Call) -> str:
    return f" ({call.frame})" if call.frame else ""


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    return f"ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''} wait"
