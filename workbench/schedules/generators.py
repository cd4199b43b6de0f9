"""The named pipeline schedules, and the tables that they generate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from workbench.schedules.named.dualpipe_v import DUALPIPE_V
from workbench.schedules.named.gpipe import GPIPE
from workbench.schedules.named.interleaved_1f1b import INTERLEAVED_1F1B
from workbench.schedules.named.one_f_one_b import (
    EAGER_1F1B,
    ONE_F_ONE_B,
    row_with_warm_up,
    shortened_warm_up,
)
from workbench.schedules.named.pipeline_schedule import PipelineSchedule
from workbench.schedules.named.zero_bubble import ZB_H1, ZB_H2, ZB_V
from workbench.schedules.simulator import Transport
from workbench.schedules.table import Table

SCHEDULES: dict[str, PipelineSchedule] = {
    "gpipe": GPIPE,
    "1f1b": ONE_F_ONE_B,
    "eager-1f1b": EAGER_1F1B,
    "interleaved": INTERLEAVED_1F1B,
    "zb-h1": ZB_H1,
    "zb-h2": ZB_H2,
    "zb-v": ZB_V,
    "dualpipe-v": DUALPIPE_V,
}


def generate(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    in_flight: Sequence[int] | None = None,
) -> Table:
    """The compute-only table of the schedule `name` on `ranks` pipeline ranks, `chunks` stages on
    each.

    Fewer microbatches than ranks are legal but for interleaved (a multiple of the ranks) and
    dualpipe-v (two a rank): the pipeline then never fills.

    Args:
        name: Of the schedule.
        ranks: Of the pipeline.
        microbatches: Of a step.
        chunks: Stages of a rank.
        in_flight: Most microbatches whose activations each rank keeps (D of 2007.01045); None: as
            many as the schedule has. A rank after one that keeps fewer has no more than that one.

    Raises:
        ValueError: The name is unknown, or the schedule does not take a number.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} does not exist; there are: {', '.join(names())}")
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{what} = {value}; at least 1")
    _check_chunks(name, chunks)
    _check_microbatches(name, ranks, microbatches)
    held = None if in_flight is None else warm_up(name, ranks, in_flight)
    return _table(name, ranks, microbatches, chunks, held)


def warm_up(
    name: str,
    ranks: int,
    in_flight: Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Microbatches in flight by stage of a schedule of `bounded_names`, `in_flight` at most on a
    rank. Where `replicas` of a stage take them in turn, all of these have as many together.

    Raises ValueError for another schedule, and where `in_flight` has no number of one or more for
    every stage.
    """
    held = SCHEDULES[name].warm_up
    if held is None:
        raise ValueError(
            f"schedule {name!r} has its own number of microbatches in flight; in_flight bounds it "
            f"under: {', '.join(bounded_names())}"
        )
    each = replicas or [1] * ranks
    own = held(each)
    if in_flight is None:
        return own
    if len(in_flight) != ranks or min(in_flight) < 1:
        raise ValueError(f"in_flight = {list(in_flight)}; {ranks} numbers of at least 1")
    return shortened_warm_up(own, [most * count for most, count in zip(in_flight, each)])


def bounded_names() -> tuple[str, ...]:
    """Schedules whose microbatches in flight can be bounded: 1F1B after a warm-up."""
    return tuple(name for name, schedule in SCHEDULES.items() if schedule.warm_up is not None)


def names() -> tuple[str, ...]:
    """Schedules that `generate` knows."""
    return tuple(sorted(SCHEDULES))


def receives_early(name: str, of: Transport) -> bool:
    """True where a plan's schedule posts its receives early; a table that a user drew does not.

    Every named schedule does on gloo, whose transfers start only when both ends have posted them:
    a receive posted when its tensor is read would wait for all of it
    (`tests/benchmarks/runtime.py`).
    """
    return name in SCHEDULES and (of == "gloo" or SCHEDULES[name].receives_early)


def _check_chunks(name: str, chunks: int) -> None:
    fewest, most = SCHEDULES[name].min_chunks, SCHEDULES[name].max_chunks
    if chunks < fewest or (most is not None and chunks > most):
        legal = f"{fewest} or more" if most is None else str(fewest)
        raise ValueError(f"chunks = {chunks}; schedule {name!r} takes {legal} a rank")


def _check_microbatches(name: str, ranks: int, microbatches: int) -> None:
    schedule = SCHEDULES[name]
    if schedule.takes_microbatches(ranks, microbatches):
        return
    if schedule.needs_multiple_of_ranks:
        below = microbatches // ranks * ranks
        near = f"{below} or {below + ranks}" if below else str(ranks)
        needs = f"a multiple of its {ranks} ranks, such as {near}"
    else:
        least = schedule.min_microbatches_per_rank
        needs = f"{least} for each of its {ranks} ranks, at least {least * ranks}"
    raise ValueError(f"microbatches = {microbatches}; schedule {name!r} needs {needs}")


@lru_cache(maxsize=64)
def _table(
    name: str, ranks: int, microbatches: int, chunks: int, held: tuple[int, ...] | None
) -> Table:
    schedule, stages = SCHEDULES[name], ranks * chunks
    rows = tuple(
        row_with_warm_up(rank, held[rank], microbatches)
        if held
        else schedule.row(rank, ranks, microbatches, chunks)
        for rank in range(ranks)
    )
    home = (lambda s: min(s, stages - 1 - s)) if schedule.is_v_shaped else (lambda s: s % ranks)
    return Table(
        rows, stages, microbatches, placement=tuple(home(stage) for stage in range(stages))
    )
