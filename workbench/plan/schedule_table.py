"""The schedule of a plan as a table: a named one, its warm-up as long as the plan lets it be, or
one that a user drew, held against the plan that names it.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from itertools import pairwise
from math import lcm
from pathlib import Path

from workbench.errors import PlanError, refuse
from workbench.machine.hardware import GPU
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.safe_io.files import known_file, unread
from workbench.schedules import (
    Table,
    Transport,
    bounded_names,
    executable,
    generate,
    read_csv,
    receives_early,
    round_robin,
    simulate,
    uniform,
    validate,
    warm_up,
)
from workbench.schedules.generators import SCHEDULES

FIELD = "strategy.pipeline.schedule"
SHOWN = 3
"""Problems of a table that are reported; the rest mostly follow from them."""


def drawn(plan: ResolvedPlan) -> Table | None:
    """The table that a complete plan's schedule names; None where it is a named one.

    Raises `PlanError` where the file cannot be read, is no valid schedule (with the place: the
    rank, the action, the cycle), or is one of other ranks, stages or microbatches.
    """
    pipeline = plan.strategy.pipeline
    if not pipeline.schedule.endswith(".csv"):
        return None
    table = _read(pipeline.schedule)
    wanted = (pipeline.size, pipeline.size * pipeline.chunks, plan.num_microbatches)
    has = (table.ranks, table.stages, table.microbatches)
    for what, count, want in zip(("ranks", "stages", "microbatches"), has, wanted):
        if count != want:
            raise refuse(
                FIELD,
                f"'{pipeline.schedule}' has {count} {what}, the plan {want}; legal: a table of "
                f"{wanted[0]} ranks, {wanted[1]} stages and {wanted[2]} microbatches",
            )
    return table


def stages_in_flight(plan: ResolvedPlan) -> tuple[int, ...] | None:
    """Microbatches in flight by stage that a complete plan's schedule and `in_flight` allow, on all
    replicas that take them in turn; None where the schedule is not 1F1B after a warm-up.
    """
    p = plan.strategy.pipeline
    if p.schedule not in bounded_names():
        return None
    turns = p.replicas if p.is_round_robin else None
    return warm_up(p.schedule, p.size, _most_in_flight(plan), turns)


def _most_in_flight(plan: ResolvedPlan) -> list[int] | None:
    """`in_flight` of a complete plan, by stage."""
    p = plan.strategy.pipeline
    return [p.in_flight] * p.size if isinstance(p.in_flight, int) else p.in_flight


def schedule_table(plan: ResolvedPlan) -> Table:
    """The compute of a complete plan as a table; one that a user drew may have its transfers too.

    Without a pipeline a schedule has nothing to order: one stage, each microbatch forward and
    backward. Raises `PlanError` as `drawn` does.
    """
    if (table := drawn(plan)) is not None:
        return table
    p = plan.strategy.pipeline
    if p.is_round_robin:
        name, held = ("1f1b", None) if p.size == 1 else (p.schedule, stages_in_flight(plan))
        return round_robin(name, p.replicas or [], plan.num_microbatches, held)
    if p.size == 1:
        return generate("1f1b", 1, plan.num_microbatches)
    held = None if p.in_flight is None else stages_in_flight(plan)
    return generate(p.schedule, p.size, plan.num_microbatches, p.chunks, held)


def executed(plan: ResolvedPlan) -> tuple[Table, list[int]]:
    """(the table that the engine runs, with its transfers; layers of each stage) of a complete
    plan.

    Where gradients are sharded by the microbatch they are reduced after every backward.
    """
    table, partition = schedule_table(plan), plan.strategy.pipeline.partition
    early = receives_early(plan.strategy.pipeline.schedule, transport(plan.gpu))
    return executable(table, plan.shards_gradients, early), partition if table.stages > 1 else [
        sum(partition)
    ]


def transport(gpu: GPU) -> Transport:
    """How P2P transfers progress on the backend of a GPU's device."""
    return "gloo" if gpu.device == "cpu" else "nccl"


def transfer_pairs(plan: ResolvedPlan) -> list[tuple[int, int]]:
    """Pairs of pipeline ranks that send to each other, the lower first: those of neighboring
    stages, and of the first and the last stage where they share a weight, on an axis of its own
    where stages have replicas of their own.
    """
    table = schedule_table(plan)
    turns = range(min(lcm(*table.replicas), table.microbatches))
    paths = [[table.home(stage, m) for stage in range(table.stages)] for m in turns]
    found = {pair for path in paths for pair in pairwise(path)}
    if plan.ties_weights and not plan.strategy.pipeline.replicas:
        found.add((table.placement[0], table.placement[-1]))
    return sorted({(min(pair), max(pair)) for pair in found if pair[0] != pair[1]})


def pair_groups(plan: ResolvedPlan) -> bool:
    """Whether each pair of pipeline ranks has a process group of its own: on NCCL, where the one
    order of transfers of a shared group would cost more than a percent of the step.
    """
    p = plan.strategy.pipeline
    ranks = sum(p.replicas or []) if p.is_round_robin else p.size
    if transport(plan.gpu) != "nccl" or ranks <= 2:
        return False
    if p.is_round_robin:  # replicas of a stage would wait for each other's transfers
        return True
    table = drawn(plan)
    if table is None:
        return named_pair_groups(p.schedule, p.size, transport(plan.gpu))
    return _held_up_in_one_group(table)


def named_pair_groups(schedule: str, ranks: int, of: Transport) -> bool:
    """`pair_groups` of a named schedule, its transfers being those `of` a transport."""
    return of == "nccl" and ranks > 2 and SCHEDULES[schedule].pair_groups


@lru_cache(maxsize=16)
def _held_up_in_one_group(table: Table) -> bool:
    lowered, durations = executable(table), uniform(table.stages)
    one, pairs = (
        simulate(lowered, durations, transport="nccl", pair_groups=each).makespan
        for each in (False, True)
    )
    return one > 1.01 * pairs


def problem(plan: ResolvedPlan) -> PlanError | None:
    """What is wrong with the table that a plan names, if anything."""
    p = plan.strategy.pipeline
    try:
        table = drawn(plan)
        if p.schedule_sha256 is not None and (
            table is None or p.schedule_sha256 != schedule_sha256(p.schedule)
        ):
            now = (
                "names no file"
                if table is None
                else f"'{p.schedule}' now has {schedule_sha256(p.schedule)}"
            )
            return refuse(
                f"{FIELD}_sha256",
                f"is {p.schedule_sha256}, but {now}; remove the field to take what is there",
            )
    except PlanError as error:
        return error
    return None


def schedule_sha256(path: str) -> str:
    """sha256 of a table's file, which `drawn` has read."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _read(path: str) -> Table:
    try:
        known = known_file(path)
        return _valid(path, known.st_mtime_ns, known.st_size)
    except OSError as error:
        raise refuse(FIELD, f"'{path}' cannot be used: {unread(error)}") from None
    except ValueError as error:
        raise refuse(
            FIELD, f"'{path}' cannot be used: {str(error).removeprefix(f'{path}: ')}"
        ) from None


@lru_cache(maxsize=16)
def _valid(path: str, changed: int, size: int) -> Table:
    """Read and validated once as long as the file stays as it is."""
    table = read_csv(path)
    found = validate(table)
    if found:
        more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise ValueError("; ".join(found[:SHOWN]) + more)
    executable(table)  # Deadlock where no order of transfers can work
    return table
