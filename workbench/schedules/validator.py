"""What is wrong with a table, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from workbench.schedules.action import COMPUTE, WHOLE_STAGE, Action, matching
from workbench.schedules.lowering import disorder, transfer_after, transfer_before
from workbench.schedules.simulator import Deadlock, simulate, uniform
from workbench.schedules.table import Table


def validate(table: Table) -> list[str]:
    """Problems of a table, compute-only or lowered; empty where it may run.

    Looks at: actions on foreign ranks or out of range, completeness, order within a rank, transfers
    without their other end, and cycles among ranks (by simulation on the strictest transport).
    """
    problems = _strangers(table)
    problems += _incomplete(table)
    problems += (
        [p for rank, row in enumerate(table.rows) for p in _misordered(table, rank)]
        if not problems
        else []
    )
    if table.lowered and not problems:
        problems += _unmatched(table) or disorder(table)
    return problems or _deadlock(table)


def _strangers(table: Table) -> list[str]:
    problems = []
    for rank, row in enumerate(table.rows):
        for action in row:
            if not 0 <= action.stage < table.stages:
                problems.append(
                    f"rank {rank}: {action} names stage {action.stage}; stages are "
                    f"0..{table.stages - 1}"
                )
            elif rank not in (homes := _homes(table, action)):
                problems.append(
                    f"rank {rank}: {action} belongs to rank {homes[0]}, which holds stage "
                    f"{action.stage}"
                )
            elif (
                action.kind not in WHOLE_STAGE
                and not 0 <= (action.microbatch or 0) < table.microbatches
            ):
                problems.append(
                    f"rank {rank}: {action} is beyond the {table.microbatches} microbatches"
                )
    return problems


def _homes(table: Table, action: Action) -> Sequence[int]:
    """Ranks on which an action may stand: those of its stage, or the one of its microbatch."""
    if action.kind in WHOLE_STAGE:
        return table.homes(action.stage)
    return (table.home(action.stage, action.microbatch),)


def _incomplete(table: Table) -> list[str]:
    count = Counter(a for row in table.rows for a in row)
    problems = [
        f"{a} stands {n} times"
        for a, n in sorted(count.items(), key=lambda x: str(x[0]))
        if n > (len(_homes(table, a)) if a.stage < table.stages else 1)
        and a.kind not in ("UNSHARD", "RESHARD")
    ]
    for stage in range(table.stages):
        for m in range(table.microbatches):
            forward, full, gradient, weight = (
                Action(stage, kind, m) in count for kind in ("F", "B", "I", "W")
            )
            if not forward:
                problems.append(f"{stage}F{m} is missing")
            if not full and not (gradient and weight):
                problems.append(
                    f"{stage}B{m} is missing"
                    + (
                        f", or its half {stage}{'W' if gradient else 'I'}{m}"
                        if gradient or weight
                        else ""
                    )
                )
            if full and (gradient or weight):
                problems.append(
                    f"{stage}B{m} stands beside its half {stage}{'I' if gradient else 'W'}{m}"
                )
    return problems


def _misordered(table: Table, rank: int) -> list[str]:
    row = table.rows[rank]
    place = {action: i for i, action in enumerate(row)}
    problems = []
    for action in (a for a in row if a.kind in COMPUTE):
        for before in _local_needs(table, action):
            if before not in place:
                problems.append(f"rank {rank}: {action} has no {before}")
            elif place[before] > place[action]:
                problems.append(f"rank {rank}: {action} stands before {before}")
        after = transfer_after(table, action) if table.lowered else None
        if after is not None and place.get(after, len(row)) < place[action]:
            problems.append(f"rank {rank}: {after} stands before {action}")
    for stage in table.stages_of(rank):
        last = max(
            (i for i, a in enumerate(row) if a.stage == stage and a.kind in ("B", "W")), default=0
        )
        if place.get(Action(stage, "REDUCE_GRAD"), len(row)) < last:
            problems.append(f"rank {rank}: {stage}REDUCE_GRAD stands before {row[last]}")
    return problems


def _local_needs(table: Table, action: Action) -> list[Action]:
    """What must stand earlier in the same row."""
    if action.kind == "W":
        return [Action(action.stage, "I", action.microbatch)]
    wanted = [Action(action.stage, "F", action.microbatch)] if action.kind in ("I", "B") else []
    received = transfer_before(table, action) if table.lowered else None
    return wanted + ([received] if received is not None else [])


def _unmatched(table: Table) -> list[str]:
    p2p = {a for row in table.rows for a in row if a.is_p2p}
    return [f"{a} has no {matching(a)}" for a in sorted(p2p, key=str) if matching(a) not in p2p]


def _deadlock(table: Table) -> list[str]:
    try:
        simulate(table, uniform(table.stages), transport="rendezvous")
    except Deadlock as error:
        return [str(error)]
    return []
