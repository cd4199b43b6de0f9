"""Rows of the schedules with one stage a rank: GPipe, 1F1B and the hand-made zero-bubble ones,
ZB-H1 and ZB-H2.
"""

from __future__ import annotations

from workbench.schedules.action import Action
from workbench.schedules.table import Row


def gpipe(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965): `microbatches` in
    flight.
    """
    forwards = [Action(rank, "F", m) for m in range(microbatches)]
    return tuple(forwards + [Action(rank, "B", m) for m in range(microbatches)])


def one_forward_one_backward(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    """DAPPLE's early backward (PPoPP'21), also PipeDream-flush (2104.04473): at most `ranks - rank`
    in flight.
    """
    warm_up = min(microbatches, ranks - 1 - rank)
    row = [Action(rank, "F", m) for m in range(warm_up)]
    for m in range(microbatches):
        if m + warm_up < microbatches:
            row.append(Action(rank, "F", m + warm_up))
        row.append(Action(rank, "B", m))
    return tuple(row)


def zb_h1(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    """ZB-H1 (Qi et al. 2024, arXiv 2401.10241, torch's ZB1P): 1F1B's forwards, at most `ranks` in
    flight.
    """
    return _split(rank, microbatches, warm_up=ranks - 1 - rank, delay=rank)


def zb_h2(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    """ZB-H2 (the same paper): twice the forwards ahead, so that no rank idles; at most `2 ranks -
    1` in flight.
    """
    return _split(rank, microbatches, warm_up=2 * (ranks - 1 - rank), delay=2 * rank)


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
