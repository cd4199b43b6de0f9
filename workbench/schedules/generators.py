"""Compute-only tables by the name of their schedule, and which numbers each schedule takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from workbench.schedules import multi_stage_rows, single_stage_rows
from workbench.schedules.table import Row, Table


@dataclass(frozen=True)
class Schedule:
    """How the rows of a schedule are made, and where its stages lie."""

    row: Callable[[int, int, int, int], Row]
    """(rank, ranks, microbatches, chunks) -> the rank's actions."""
    fewest_chunks: int = 1
    most_chunks: int | None = 1
    v_shaped: bool = False
    """Stages run down the ranks and back up; else round and round."""


SCHEDULES = {
    "gpipe": Schedule(single_stage_rows.gpipe),
    "1f1b": Schedule(single_stage_rows.one_forward_one_backward),
    "interleaved": Schedule(multi_stage_rows.interleaved, 2, None),
    "zb-h1": Schedule(single_stage_rows.zb_h1),
    "zb-h2": Schedule(single_stage_rows.zb_h2),
    "zb-v": Schedule(multi_stage_rows.zb_v, 2, 2, v_shaped=True),
    "dualpipe-v": Schedule(multi_stage_rows.dualpipe_v, 2, 2, v_shaped=True),
}


def generate(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Table:
    """The compute-only table of the schedule `name` on `ranks` pipeline ranks, `chunks` stages on
    each.

    Fewer microbatches than ranks are legal but for interleaved (a multiple of the ranks) and
    dualpipe-v (two a rank): the pipeline then never fills. Raises ValueError where the name is
    unknown or the schedule does not take a number.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} does not exist; there are: {', '.join(names())}")
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{what} = {value}; at least 1")
    _check_chunks(name, chunks)
    _check_microbatches(name, ranks, microbatches)
    return _table(name, ranks, microbatches, chunks)


def names() -> tuple[str, ...]:
    """Schedules that `generate` knows."""
    return tuple(sorted(SCHEDULES))


def _check_chunks(name: str, chunks: int) -> None:
    fewest, most = SCHEDULES[name].fewest_chunks, SCHEDULES[name].most_chunks
    if chunks < fewest or (most is not None and chunks > most):
        legal = f"{fewest} or more" if most is None else str(fewest)
        raise ValueError(f"chunks = {chunks}; schedule {name!r} takes {legal} a rank")


def _check_microbatches(name: str, ranks: int, microbatches: int) -> None:
    if name == "interleaved" and microbatches % ranks:
        below = microbatches // ranks * ranks
        near = f"{below} or {below + ranks}" if below else str(ranks)
        raise ValueError(
            f"microbatches = {microbatches}; schedule {name!r} needs a multiple of its {ranks} "
            f"ranks, such as {near}"
        )
    if name == "dualpipe-v" and ranks > 1 and microbatches < 2 * ranks:
        raise ValueError(
            f"microbatches = {microbatches}; schedule {name!r} needs two for each of its {ranks} "
            f"ranks, "
            f"at least {2 * ranks}"
        )


@lru_cache(maxsize=64)
def _table(name: str, ranks: int, microbatches: int, chunks: int) -> Table:
    schedule, stages = SCHEDULES[name], ranks * chunks
    rows = tuple(schedule.row(rank, ranks, microbatches, chunks) for rank in range(ranks))
    home = (lambda s: min(s, stages - 1 - s)) if schedule.v_shaped else (lambda s: s % ranks)
    return Table(
        rows, stages, microbatches, placement=tuple(home(stage) for stage in range(stages))
    )
