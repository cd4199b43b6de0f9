"""GPipe (Huang et al. 2019, arXiv 1811.06965): all forwards, then all backwards."""

from __future__ import annotations

from workbench.schedules.action import Action
from workbench.schedules.named.pipeline_schedule import PipelineSchedule, unsplit_bubble
from workbench.schedules.table import Row


def gpipe_row(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    """All microbatches are in flight between the last forward and the first backward."""
    forwards = [Action(rank, "F", m) for m in range(microbatches)]
    return tuple(forwards + [Action(rank, "B", m) for m in range(microbatches)])


GPIPE = PipelineSchedule(
    gpipe_row,
    unsplit_bubble,
    lambda rank, p, m, chunks: m + 0 * rank,
    lambda stage, replicas, m: gpipe_row(stage, len(replicas), m, 1),
)
