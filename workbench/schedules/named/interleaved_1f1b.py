"""Interleaved 1F1B: several stages (chunks) a rank (Narayanan et al. 2021, arXiv 2104.04473)."""

from __future__ import annotations

from workbench.schedules.action import Action
from workbench.schedules.named.pipeline_schedule import PipelineSchedule, smaller, unsplit_bubble
from workbench.schedules.table import Row


def interleaved_1f1b_row(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    """`ranks` microbatches a turn of each chunk.

    At most `2 (ranks - rank - 1) + (chunks - 1) ranks + 1` chunks in flight.
    """
    total = chunks * microbatches
    warm_up = min(total, 2 * (ranks - 1 - rank) + (chunks - 1) * ranks)
    row = [_action("F", k, rank, ranks, chunks) for k in range(warm_up)]
    for k in range(total):
        if k + warm_up < total:
            row.append(_action("F", k + warm_up, rank, ranks, chunks))
        row.append(_action("B", k, rank, ranks, chunks))
    return tuple(row)


def _action(kind: str, k: int, rank: int, ranks: int, chunks: int) -> Action:
    """The k-th forward or backward of a rank: first chunk first, backwards from the last."""
    turn, within = divmod(k, ranks)
    group, chunk = divmod(turn, chunks)
    chunk = chunk if kind == "F" else chunks - 1 - chunk
    return Action(chunk * ranks + rank, kind, group * ranks + within)


INTERLEAVED_1F1B = PipelineSchedule(
    interleaved_1f1b_row,
    unsplit_bubble,
    lambda rank, p, m, chunks: smaller(m * chunks, 2 * (p - rank - 1) + (chunks - 1) * p + 1),
    min_chunks=2,
    max_chunks=None,
    needs_multiple_of_ranks=True,
)
