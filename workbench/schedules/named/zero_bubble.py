"""Zero-bubble schedules, which split backward into I and W and defer W: ZB-H1, ZB-H2 (Qi et al.
2024, arXiv 2401.10241) and ZB-V (2405.15362).
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.schedules.action import Action
from workbench.schedules.named.one_f_one_b import replicated_warm_up
from workbench.schedules.named.pipeline_schedule import (
    Number,
    Paths,
    PipelineSchedule,
    larger,
    longest,
    smaller,
)
from workbench.schedules.named.v_shaped_rows import numbered_actions, v_stages
from workbench.schedules.table import Row


def zb_h1_row(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    """ZB-H1 (torch calls it ZB1P): 1F1B's forwards, at most `ranks` in
    flight.
    """
    return _replicated_h1_row(rank, [1] * ranks, microbatches)


def zb_h2_row(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    """ZB-H2: twice the forwards ahead, so that no rank idles; at most `2 ranks -
    1` in flight.
    """
    return _replicated_h2_row(rank, [1] * ranks, microbatches)


def _replicated_h1_row(stage: int, replicas: Sequence[int], microbatches: int) -> Row:
    """Forwards as under 1F1B; a replica computes weight gradients `stage` of its own microbatches
    late.
    """
    late, ahead = stage * replicas[stage], replicated_warm_up(replicas)[stage] - 1
    return _split(stage, microbatches, warm_up=ahead, delay=late)


def _replicated_h2_row(stage: int, replicas: Sequence[int], microbatches: int) -> Row:
    late, ahead = stage * replicas[stage], replicated_warm_up(replicas)[stage] - 1
    return _split(stage, microbatches, warm_up=2 * ahead, delay=2 * late)


def _split(rank: int, microbatches: int, warm_up: int, delay: int) -> Row:
    """`warm_up` forwards, then forward and input gradient in turn, each weight gradient `delay`
    microbatches late.

    A later rank starts its weight gradients later by what its shorter warm-up saves: all ranks hold
    as much.
    """
    warm_up = min(microbatches, warm_up)
    row = [Action(rank, "F", m) for m in range(warm_up)]
    for m in range(microbatches):
        if m + warm_up < microbatches:
            row.append(Action(rank, "F", m + warm_up))
        row.append(Action(rank, "I", m))
        if m >= delay:
            row.append(Action(rank, "W", m - delay))
    return tuple(
        row + [Action(rank, "W", m) for m in range(max(0, microbatches - delay), microbatches)]
    )


def zb_v_row(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    """ZB-V: two chunks in a V, at most `2 ranks` half-stage
    chunks in flight.

    Drawn for at least `2 ranks - 1` microbatches; of fewer, the others are left out.
    """
    drawn, below = max(microbatches, 2 * ranks - 1), ranks - rank
    steps = [
        (2 * below - 1, "F0"),
        (rank, "F1 F0"),
        (below, "F1 I1 W1"),
        (drawn - ranks - below + 1, "F0 I0 W0 F1 I1 W1"),
        (below - 1, "I0 W0 F1 I1 W1"),
        (rank, "I0 I1"),
        (below, "I0 W0"),
        (rank, "W1"),
        (rank, "W0"),
    ]
    return tuple(
        a
        for a in numbered_actions(v_stages(rank, ranks), steps)
        if (a.microbatch or 0) < microbatches
    )


def _zb_h1_bubble(p: Number, m: Number, chunks: Number, f: Number, i: Number, w: Number) -> Number:
    return (p - 1) * (f + i) - (smaller(m, p) - 1) * smaller(smaller(f, i), w)


def _zb_h2_bubble(p: Number, m: Number, chunks: Number, f: Number, i: Number, w: Number) -> Number:
    """An odd number of microbatches ahead cannot be halved between forward and input gradient: two
    more paths.
    """
    n = p - 1
    ahead = smaller(m - 1, 2 * n)
    odd = ahead % 2
    half = (ahead - odd) / 2
    paths = (
        (n, n, -ahead),
        (n - ahead, n, 0),
        (n, n - half - odd, 0),
        (n, n - half, -odd),
        (n - odd, n - half, 0),
    )
    return longest(paths, f, i, w)


def _zb_v_bubble(p: Number, m: Number, chunks: Number, f: Number, i: Number, w: Number) -> Number:
    n = p - 1
    more = smaller(larger(m - p, 0), smaller(n, 1))
    filling, filled = _zb_v_filling(n, smaller(m - 1, n)), _zb_v_filled(n, smaller(m - p, n))
    return ((1 - more) * longest(filling, f, i, w) + more * longest(filled, f, i, w)) / 2


def _zb_v_filling(n: Number, q: Number) -> Paths:
    """q + 1 microbatches, one a rank at most."""
    return (
        (2 * n - q, 2 * n - q, 0),
        (2 * n - 2 * q, 2 * n, 0),
        (2 * n, 2 * n - 3 * q, -q),
        (2 * n, 2 * n - 2 * q, -2 * q),
    )


def _zb_v_filled(n: Number, k: Number) -> Paths:
    """k microbatches more than ranks, 1 to n: more than n change nothing."""
    left = n - k
    return (
        (0, 2 * n, -2 * k),
        (0, 2 * left, 0),
        (0, n + left, -left),
        (0, left + 1, k - 1),
        (left, left, 0),
        (left + 1, 0, k - 1),
        (n + k - 1, 1 - k, 0),
        (n + k - 1, left + 1 - k, -left),
        (n + k - 1, left + 1, -2 * k),
        (n + k, -k, -1),
        (n + k, left - k, -smaller(k, left + 1)),
        (n + k, left, -2 * k - 1),
        (2 * n, -n, -smaller(n, 2 * left + 1)),
        (2 * n, -k, -smaller(n + left, 3 * left + 1)),
        (2 * n, 0, -2 * n - 1),
    )


ZB_H1 = PipelineSchedule(
    zb_h1_row,
    _zb_h1_bubble,
    lambda rank, p, m, chunks: smaller(m, p) + 0 * rank,
    _replicated_h1_row,
    splits_backward=True,
)
ZB_H2 = PipelineSchedule(
    zb_h2_row,
    _zb_h2_bubble,
    lambda rank, p, m, chunks: smaller(m, 2 * p - 1) + 0 * rank,
    _replicated_h2_row,
    splits_backward=True,
)
ZB_V = PipelineSchedule(
    zb_v_row,
    _zb_v_bubble,
    lambda rank, p, m, chunks: smaller(smaller(2 * m, m + 1 + rank), 2 * p),
    min_chunks=2,
    max_chunks=2,
    is_v_shaped=True,
    splits_backward=True,
    last_rank_has_most=True,
)
