"""Replay of all ranks' calls on the strictest transport.

Calls run in program order, and each blocks its rank, so that an order in which NCCL's calls may
wait for each other is found. (What is not: kernels of several communicators that take each other's
place on a GPU.) A collective runs when every rank of its group is at it; groups are made by all
ranks of the world, in one order. A P2P batch is one NCCL group call, whose operations need not
progress one by one (NVIDIA/nccl issue 1279): it runs when every batch that it is joined to,
directly or by others, is at its rank's head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from workbench.rehearsal.call_trace import P2P, Call

MOST_PROBLEMS = 8


def replay(traces: Mapping[int, Sequence[Call]]) -> list[str]:
    """What is wrong with the calls of all ranks, in words; empty where they all complete.

    Args:
        traces: Rank -> its calls, of every rank of the world.
    """
    found = [*_host_tensors(traces), *_first_uses(traces)]
    found += _Replay(traces).run()
    more = len(found) - MOST_PROBLEMS
    return [*found[:MOST_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]


def _host_tensors(traces: Mapping[int, Sequence[Call]]) -> list[str]:
    return [
        f"rank {rank} gives {call} a tensor in host memory, which NCCL refuses"
        for rank, calls in traces.items()
        for call in calls
        if call.on_host
    ]


def _first_uses(traces: Mapping[int, Sequence[Call]]) -> list[str]:
    """Groups whose first call is not made by all of their ranks together: NCCL creates the
    communicator there, and waits for every rank.
    """
    first: dict[tuple[str, tuple[int, ...]], dict[int, Call]] = {}
    for rank, calls in traces.items():
        for call in calls:
            first.setdefault((call.group, call.ranks), {}).setdefault(rank, call)
    problems = []
    for (group, ranks), by_rank in first.items():
        absent = [rank for rank in ranks if rank not in by_rank]
        alone = [call for call in by_rank.values() if call.kind in P2P]
        if len(ranks) > 1 and (absent or alone):
            who = f"ranks {absent} never use it" if absent else f"the first call is {alone[0]}"
            problems.append(f"group {group} {ranks} is not connected by all of its ranks: {who}")
    return problems


class _Replay:
    def __init__(self, traces: Mapping[int, Sequence[Call]]) -> None:
        self.steps = {rank: _steps(calls) for rank, calls in traces.items()}
        self.at = dict.fromkeys(traces, 0)

    def run(self) -> list[str]:
        ready = set(self.steps)
        while ready:
            rank = ready.pop()
            head = self._head(rank)
            if head is None:
                continue
            together = self._batch(rank) if head[0].kind in P2P else self._collective(head[0])
            if isinstance(together, str):
                return [together]
            for other in together:
                self.at[other] += 1
            ready |= set(together)
        stuck = {rank: head for rank in self.steps if (head := self._head(rank)) is not None}
        return [f"rank {rank} waits for ever in {_words(head)}" for rank, head in stuck.items()]

    def _head(self, rank: int) -> tuple[Call, ...] | None:
        steps = self.steps[rank]
        return steps[self.at[rank]] if self.at[rank] < len(steps) else None

    def _collective(self, call: Call) -> set[int] | str:
        """Ranks of the group if all are at the collective; a message where they disagree."""
        for other in call.ranks:
            head = self._head(other)
            if head is None or (head[0].group, head[0].ranks) != (call.group, call.ranks):
                return set()
            if head[0].kind in P2P:
                return set()
            if not _agree(call, head[0]):
                return f"members of a group disagree: {call}, rank {other} calls {head[0]}"
        return self._uneven(call.ranks) or set(call.ranks)

    def _uneven(self, ranks: tuple[int, ...]) -> str:
        """Two ranks of an all-to-all that disagree about what one sends to the other; empty where
        none do.
        """
        heads = [head[0] for rank in ranks if (head := self._head(rank)) is not None]
        for i, one in enumerate(heads):
            for j, other in enumerate(heads):
                if one.sent and other.received and one.sent[j] != other.received[i]:
                    return (
                        f"rank {ranks[i]} sends {one.sent[j]} rows to rank {ranks[j]}, which "
                        f"expects {other.received[i]}, in {one}"
                    )
        return ""

    def _batch(self, rank: int) -> set[int] | str:
        """Ranks whose batches are joined to `rank`'s, if all are at them."""
        joined, todo = {rank}, [rank]
        while todo:
            own = todo.pop()
            wanted = Counter((call.group, call.ranks, call.peer) for call in self._head(own) or ())
            for _, _, peer in wanted:
                theirs = self._head(peer)
                if theirs is None or theirs[0].kind not in P2P:
                    return set()
                if (wrong := self._unmatched(own, peer)) is not None:
                    return wrong
                if peer not in joined:
                    joined.add(peer)
                    todo.append(peer)
        return joined

    def _unmatched(self, rank: int, peer: int) -> set[int] | str | None:
        """An empty set where the peer's batch is not the one that `rank`'s waits for; a message
        where tensors differ; None where all match.
        """
        mine = [call for call in self._head(rank) or () if call.peer == peer]
        theirs = [call for call in self._head(peer) or () if call.peer == rank]
        for kind, opposite in (P2P, P2P[::-1]):
            one = [call for call in mine if call.kind == kind]
            other = [call for call in theirs if call.kind == opposite]
            if [(c.group, c.ranks) for c in one] != [(c.group, c.ranks) for c in other]:
                return set()
            for call, match in zip(one, other):
                if (call.dtype, call.numel) != (match.dtype, match.numel):
                    return f"rank {rank} calls {call}, rank {peer} calls {match}"
        return None


def _agree(one: Call, other: Call) -> bool:
    """Whether two members call the same; only all-to-alls may differ in how much a rank has."""
    same = (one.kind, one.dtype, one.peer) == (other.kind, other.dtype, other.peer)
    return same and (one.kind == "all_to_all" or one.numel == other.numel)


def _steps(calls: Sequence[Call]) -> list[tuple[Call, ...]]:
    """The calls with those of one P2P batch together."""
    steps: list[list[Call]] = []
    for call in calls:
        if steps and call.batch >= 0 and steps[-1][0].batch == call.batch:
            steps[-1].append(call)
        else:
            steps.append([call])
    return [tuple(step) for step in steps]


def _words(head: tuple[Call, ...]) -> str:
    return " and ".join(map(str, head))
