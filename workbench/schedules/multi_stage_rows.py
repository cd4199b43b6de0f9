"""Rows of the schedules with several stages (chunks) a rank: interleaved 1F1B, ZB-V and
DualPipe-V.
"""

from __future__ import annotations

from collections import Counter

from workbench.schedules.action import Action
from workbench.schedules.table import Row

Steps = list[tuple[int, str]]
"""(How often, words): a word is a kind and which of the rank's chunks, `F0`; a bare `W` takes the
oldest of any.
"""


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    """Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473), `ranks` microbatches a turn of
    each chunk.

    At most `2 (ranks - rank - 1) + (chunks - 1) ranks + 1` chunks in flight.
    """
    total = chunks * microbatches
    warm_up = min(total, 2 * (ranks - 1 - rank) + (chunks - 1) * ranks)
    row = [_turn("F", k, rank, ranks, chunks) for k in range(warm_up)]
    for k in range(total):
        if k + warm_up < total:
            row.append(_turn("F", k + warm_up, rank, ranks, chunks))
        row.append(_turn("B", k, rank, ranks, chunks))
    return tuple(row)


def _turn(kind: str, k: int, rank: int, ranks: int, chunks: int) -> Action:
    """The k-th forward or backward of a rank: first chunk first, backwards from the last."""
    turn, within = divmod(k, ranks)
    group, chunk = divmod(turn, chunks)
    chunk = chunk if kind == "F" else chunks - 1 - chunk
    return Action(chunk * ranks + rank, kind, group * ranks + within)


def zb_v(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    """ZB-V (Qi et al. 2024, arXiv 2405.15362): two chunks in a V, at most `2 ranks` half-stage
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
        a for a in _numbered(_v_stages(rank, ranks), steps) if (a.microbatch or 0) < microbatches
    )


def dualpipe_v(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    """DualPipe-V (DeepSeek's DualPipe cut in half; torch's ScheduleDualPipeV): `2 ranks + 1`
    half-stage chunks.

    A forward and a backward that overlap stand one after the other.
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
    return tuple(_numbered(_v_stages(rank, ranks), steps))


def _v_stages(rank: int, ranks: int) -> tuple[int, int]:
    """The two stages of a rank: one on the way down the V, one on the way up."""
    return rank, 2 * ranks - 1 - rank


def _numbered(stages: tuple[int, int], steps: Steps) -> list[Action]:
    """Actions of the drawn steps, each kind of each chunk taking its microbatches in order."""
    row: list[Action] = []
    count: Counter[tuple[str, int]] = Counter()
    waiting: list[Action] = []
    for word in (word for times, words in steps for _ in range(times) for word in words.split()):
        if word[0] == "W":
            action = next(w for w in waiting if word == "W" or w.stage == stages[int(word[1])])
            waiting.remove(action)
        else:
            # B and I are both the microbatch's backward: they share their count.
            stage, key = stages[int(word[1])], ("F" if word[0] == "F" else "I", int(word[1]))
            action = Action(stage, word[0], count[key])
            count[key] += 1
            waiting += [Action(stage, "W", action.microbatch)] if word[0] == "I" else []
        row.append(action)
    return row
