"""Lowering: a compute-only table becomes one that can be executed, with transfers and gradient
reduction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from workbench.schedules.action import RECVS, SENDS, Action, matching
from workbench.schedules.simulator import simulate, uniform
from workbench.schedules.table import Table

HIDDEN_TRANSFER = 0.5
"""Seconds of a transfer, where a forward takes 1, by which receives that are posted early are
ordered.
"""


def lower(table: Table, reduce_each: bool = False, early: bool = False) -> Table:
    """Insert SEND and RECV in one globally consistent order, and one REDUCE_GRAD after a stage's
    last backward.

    Receives follow the order of their sends, each transfer alone: no transfer then needs another of
    its own rank to progress, which NCCL does not promise even within a group of calls.

    Args:
        table: Compute-only.
        reduce_each: Gradients are reduced after every backward instead.
        early: Receives are posted before the compute during which their sends are expected, so that
            transfers that take time run beside it; their buffers live longer.

    Raises:
        ValueError: The table already has transfers.
        Deadlock: No order of transfers can work.
    """
    if table.lowered:
        raise ValueError(
            "the table already has sends and receives; lower() takes a compute-only table"
        )
    rows = _in_order_of_sends(table, HIDDEN_TRANSFER if early else 0.0)
    rows = [_posted_early(row) for row in rows] if early else rows
    return _with_rows(table, [_with_reduction(row, reduce_each) for row in rows])


@lru_cache(maxsize=8)
def executable(table: Table, reduce_each: bool = False, early: bool = False) -> Table:
    """The table with all that an executor needs: transfers where it has none (`lower`), a
    REDUCE_GRAD for every stage.

    UNSHARD and RESHARD are left out: when parameters are gathered is not the schedule's to say.
    Raises Deadlock where no order of transfers can work.
    """
    rows = [[a for a in row if a.kind not in ("UNSHARD", "RESHARD")] for row in table.rows]
    if table.lowered:
        return _with_rows(table, [_with_reduction(row, reduce_each) for row in rows])
    plain = [[a for a in row if a.kind != "REDUCE_GRAD"] for row in rows]
    return lower(_with_rows(table, plain), reduce_each, early)


def forwards(table: Table) -> Table:
    """The forwards of a table alone, each rank's in their order, with their transfers: an
    evaluation.
    """
    return lower(_with_rows(table, [[a for a in row if a.kind == "F"] for row in table.rows]))


def _with_rows(table: Table, rows: list[list[Action]]) -> Table:
    return replace(table, rows=tuple(map(tuple, rows)))


def transfer_after(table: Table, action: Action) -> Action | None:
    """The SEND that a compute action's result needs, or None where it stays on its rank."""
    if action.kind not in ("F", "I", "B"):
        return None
    to, kind = (action.stage + 1, "SEND_F") if action.kind == "F" else (action.stage - 1, "SEND_B")
    if not _crosses_ranks(table, action, to):
        return None
    return Action(action.stage, kind, action.microbatch)


def transfer_before(table: Table, action: Action) -> Action | None:
    """The RECV that a compute action waits for, or None where its input is on its rank."""
    if action.kind not in ("F", "I", "B"):
        return None
    source, kind = (
        (action.stage - 1, "RECV_F") if action.kind == "F" else (action.stage + 1, "RECV_B")
    )
    if not _crosses_ranks(table, action, source):
        return None
    return Action(action.stage, kind, action.microbatch)


def _crosses_ranks(table: Table, action: Action, other: int) -> bool:
    """Whether the microbatch of an action is on another rank at stage `other`."""
    if not 0 <= other < table.stages:
        return False
    return table.home(other, action.microbatch) != table.home(action.stage, action.microbatch)


def _in_order_of_sends(table: Table, transfer: float) -> list[list[Action]]:
    """Receives enter a row before whatever the rank sends or uses later than their own sends.

    No deadlock is possible: take the earliest unfinished transfer in order of sends. Its sender
    waits only for earlier ones, and so does its receiver, which posts it before anything later.
    """
    rows: list[list[Action]] = [[] for _ in table.rows]
    arriving: list[list[Action]] = [[] for _ in table.rows]
    for rank, action in _walk(table, transfer):
        received = transfer_before(table, action)
        if received in arriving[rank]:
            until = arriving[rank].index(received) + 1
            rows[rank] += arriving[rank][:until]
            del arriving[rank][:until]
        rows[rank].append(action)
        send = transfer_after(table, action)
        if send is not None:
            rows[rank] += [*arriving[rank], send]
            arriving[rank].clear()
            receive = matching(send)
            arriving[table.home(receive.stage, receive.microbatch)].append(receive)
    return rows


def _posted_early(row: list[Action]) -> list[Action]:
    """Each receive before the compute action that it follows: no transfer passes another, so that
    what holds of their order still does.
    """
    found: list[Action] = []
    for action in row:
        behind = action.kind in RECVS and found and not found[-1].is_p2p
        found.insert(len(found) - bool(behind), action)
    return found


def _walk(table: Table, transfer: float) -> Iterator[tuple[int, Action]]:
    """Compute actions in an order in which they could finish, all forwards and backwards taking
    unit time, and a transfer `transfer`.
    """
    timeline = simulate(table, uniform(table.stages), transfer)
    for interval in sorted(timeline.intervals, key=lambda i: (i.end, i.rank)):
        yield interval.rank, interval.action


def disorder(table: Table) -> list[str]:
    """Pairs of ranks whose two ends list their transfers in different orders (P2P matches by order
    alone).
    """
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(table.rows):
        for action in row:
            if action.kind in SENDS:
                sent.setdefault((rank, _peer(table, action)), []).append(matching(action))
            elif action.kind in RECVS:
                received.setdefault((_peer(table, action), rank), []).append(action)
    pairs = sorted(set(sent) | set(received))
    return [
        f"rank {a} sends to rank {b} in another order than it receives"
        for a, b in pairs
        if sent.get((a, b)) != received.get((a, b))
    ]


def _peer(table: Table, action: Action) -> int:
    other = matching(action)
    return table.home(other.stage, other.microbatch) if 0 <= other.stage < table.stages else -1


def _with_reduction(row: list[Action], each: bool) -> list[Action]:
    """REDUCE_GRAD after each stage's last backward and the transfers that follow it, so that no
    peer waits for it.

    A stage that has one keeps it. With `each` it follows every backward.
    """
    reduced = {a.stage for a in row if a.kind == "REDUCE_GRAD"}
    done = [
        (a.stage, i) for i, a in enumerate(row) if a.kind in ("B", "W") and a.stage not in reduced
    ]
    due: dict[int, list[Action]] = {}
    for stage, index in done if each else dict(done).items():
        while index + 1 < len(row) and row[index + 1].is_p2p:
            index += 1
        due.setdefault(index, []).append(Action(stage, "REDUCE_GRAD"))
    return [a for i, action in enumerate(row) for a in (action, *due.get(i, ()))]
