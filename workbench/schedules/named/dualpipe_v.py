"""DualPipe-V: DeepSeek's DualPipe cut in half (DeepSeek-V3, arXiv 2412.19437; torch's
ScheduleDualPipeV).
"""

from __future__ import annotations

from workbench.schedules.named.pipeline_schedule import Number, PipelineSchedule, longest, smaller
from workbench.schedules.named.v_shaped_rows import numbered_actions, v_stages
from workbench.schedules.table import Row


def dualpipe_v_row(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    """At most `2 ranks + 1` half-stage chunks in flight.

    A forward and a backward that overlap are listed one after the other.
    """
    below = ranks - 1 - rank
    backwards = [kind for kind in "BI" for _ in range(rank + 1)]
    steps = [
        (2 * below, "F0"),
        (rank + 1, "F0 F1"),
        (below, "I1 W F1"),
        (microbatches - ranks - below, "F0 B1 F1 B0"),
        (below, "B1 F1 B0"),
        # The two chunks in turn; the weight gradients of the later half fill what the pipeline
        # leaves idle.
        (1, " ".join(f"{kind}{1 - i % 2}" for i, kind in enumerate(backwards))),
        (below, "W I0"),
        (rank + 1, "W"),
    ]
    return tuple(numbered_actions(v_stages(rank, ranks), steps))


def _dualpipe_v_bubble(
    p: Number, m: Number, chunks: Number, f: Number, i: Number, w: Number
) -> Number:
    n = p - 1
    paths = (
        (n, 0, 0),
        (n, n, -n),
        (-1, n, 0),
        (-1, 2 * n, -n),
        (2 * n, -n, -n),
        (2 * n, 0, -2 * n),
    )
    return longest(paths, f, i, w) / 2


DUALPIPE_V = PipelineSchedule(
    dualpipe_v_row,
    _dualpipe_v_bubble,
    lambda rank, p, m, chunks: smaller(2 * m, 2 * p + 1) + 0 * rank,
    min_chunks=2,
    max_chunks=2,
    is_v_shaped=True,
    splits_backward=True,
    min_microbatches_per_rank=2,
    pair_groups=True,
)
