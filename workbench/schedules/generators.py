"""The named pipeline schedules, and the tables that they generate."""

from __future__ import annotations

from functools import lru_cache

from workbench.schedules.dualpipe_v import DUALPIPE_V
from workbench.schedules.gpipe import GPIPE
from workbench.schedules.interleaved_1f1b import INTERLEAVED_1F1B
from workbench.schedules.one_f_one_b import ONE_F_ONE_B
from workbench.schedules.pipeline_schedule import PipelineSchedule
from workbench.schedules.table import Table
from workbench.schedules.zero_bubble import ZB_H1, ZB_H2, ZB_V

SCHEDULES: dict[str, PipelineSchedule] = {
    "gpipe": GPIPE,
    "1f1b": ONE_F_ONE_B,
    "interleaved": INTERLEAVED_1F1B,
    "zb-h1": ZB_H1,
    "zb-h2": ZB_H2,
    "zb-v": ZB_V,
    "dualpipe-v": DUALPIPE_V,
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
def _table(name: str, ranks: int, microbatches: int, chunks: int) -> Table:
    schedule, stages = SCHEDULES[name], ranks * chunks
    rows = tuple(schedule.row(rank, ranks, microbatches, chunks) for rank in range(ranks))
    home = (lambda s: min(s, stages - 1 - s)) if schedule.is_v_shaped else (lambda s: s % ranks)
    return Table(
        rows, stages, microbatches, placement=tuple(home(stage) for stage in range(stages))
    )
