"""A step of unequal stages in closed form: warm-up, steady and ending phase (DAPPLE, 2007.01045,
section 4), as the longest of paths through the schedule, so that it is never above the simulator.

The paper chooses one pivot stage Q, whose work is taken never to wait in the steady phase: warm-up
is the forwards down to Q, the steady phase M - 1 of its passes, the ending phase the backwards from
Q up with the stages' all-reduces. Here every stage is the pivot once, and so is every
run of neighbours x..y: stage x may start a forward K_x microbatches after the one whose backward
has come back to it, and y then runs backward for one that went down K_y - 1 earlier, so that a
round trip of the run advances K_x - K_y + 1 microbatches. One stage is a run that advances one; the
run to the last stage binds where few are in flight beside slow transfers (policy PA). All-reduces
of stages after the pivot start from the last forward's way down and back: for those the paper takes
off the pivot's backwards, which is no bound where backwards pile up at the pivot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.planner.unequal_stages.stage_times import StageTimes

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Latency:
    """Seconds of a step."""

    seconds: float
    pivots_only: float
    """By the paths whose pivot is one stage that never waits, as in the paper."""
    pivot: int
    """The stage (transfers counted) from which the longest of those goes back."""


def latency(times: StageTimes, held: Sequence[int], microbatches: int) -> Latency:
    """Seconds of a step with `held` microbatches in flight by stage, transfers counted."""
    forward, backward = np.array(times.forward), np.array(times.backward)
    reduced = np.array(times.all_reduce)
    arrival = np.cumsum(forward) - forward
    alone = arrival + microbatches * (forward + backward)
    kept = np.minimum(held, microbatches)
    ends = np.maximum(alone, _run_ends(forward, backward, kept, microbatches))
    pivots_only, pivot = _with_all_reduce(alone, backward, reduced)
    return Latency(_with_all_reduce(ends, backward, reduced)[0], pivots_only, pivot)


def _run_ends(forward: Array, backward: Array, held: Array, microbatches: int) -> Array:
    """End of each stage's last backward by the longest path with a run of stages as its pivot."""
    both = forward + backward
    beyond = both.sum() - np.cumsum(both)
    down = np.cumsum(forward)
    # The first backward waits for the warm-up's forwards, and for a microbatch from the last stage.
    filled = down + (held - 1) * np.maximum.accumulate(forward)
    steady = np.maximum(filled, down + beyond) + _steady(both, held, microbatches)
    last_forward = _one_after_another(np.where(held < microbatches, steady, filled), forward)
    found: Array = np.maximum(_drained(steady, backward, held), last_forward + beyond + backward)
    return found


def _one_after_another(ends: Array, forward: Array) -> Array:
    """`ends` of forwards, each after that of the stage before."""
    ends = ends.copy()
    for stage in range(1, len(ends)):
        ends[stage] = max(ends[stage], ends[stage - 1] + forward[stage])
    return ends


def _steady(both: Array, held: Array, microbatches: int) -> Array:
    """Seconds from each stage's first backward to that which follows its last forward."""
    first, last = np.tril_indices(len(both))[::-1]
    sums = np.concatenate(([0.0], np.cumsum(both)))
    advance = held[first] - held[last] + 1
    trips, rest = np.divmod(microbatches - held[last], advance)
    slowest = _running_maximum(both)[first, last]
    # What is left of a trip, the slowest stage of the run does alone.
    seconds = trips * (sums[last + 1] - sums[first]) + np.where(trips > 0, rest * slowest, 0.0)
    longest = np.zeros(len(both))
    np.maximum.at(longest, last, seconds)
    return longest


def _drained(steady: Array, backward: Array, held: Array) -> Array:
    """End of each stage's last backward if those after the last forward run without a wait."""
    way = np.cumsum(backward)
    up = way[None, :] - (way - backward)[:, None]
    ends = steady + up + (held - 1) * _running_maximum(backward)
    later = np.triu(np.ones_like(ends, dtype=bool))
    found: Array = np.where(later, ends, 0.0).max(axis=1)
    return found


def _running_maximum(figures: Array) -> Array:
    """The largest of figures x to y at [x, y]; below the diagonal it means nothing."""
    found: Array = np.maximum.accumulate(np.triu(np.broadcast_to(figures, (len(figures),) * 2)), 1)
    return found


def _with_all_reduce(ends: Array, backward: Array, reduced: Array) -> tuple[float, int]:
    """The last all-reduce's end, and the stage on whose `ends` it depends: a backward follows that
    of the stage after it, and an all-reduce its stage's last backward.
    """
    longest, pivot, last = (0.0, 0), 0, 0.0
    for stage in range(len(ends) - 1, -1, -1):
        follows = last + float(backward[stage])
        last, pivot = max((float(ends[stage]), stage), (follows, pivot))
        longest = max(longest, (last + float(reduced[stage]), pivot))
    return longest
