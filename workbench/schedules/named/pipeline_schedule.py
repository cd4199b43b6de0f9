"""What defines a pipeline schedule: its rows, its closed forms, and which numbers it takes.

Closed forms hold for equal stages and transfers that take no time. They are plain arithmetic
without a branch on a value, so that every number may also be a numpy array (they broadcast): a
planner asks for millions of candidates at once.

A table's rows fix the order, so its makespan is the longest of finitely many paths: a maximum of
sums of F, I and W. The papers give the path that is longest near F = I = W; a schedule's closed
form has all that can be the longest, read off the simulator for 2 to 12 ranks and held to it by
tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from workbench.schedules.table import Row

Number = Any
"""A float, an int, or a numpy array of them."""
Paths = tuple[tuple[Number, Number, Number], ...]
"""How often F, I and W of one chunk are on each path that can be the longest, less the work of a
rank.
"""


@dataclass(frozen=True)
class PipelineSchedule:
    """A named schedule. p ranks, m microbatches; a rank has `chunks` stages (virtual stages)."""

    row: Callable[[int, int, int, int], Row]
    """(rank, p, m, chunks) -> the rank's actions, without sends and receives."""
    bubble: Callable[[Number, Number, Number, Number, Number, Number], Number]
    """(p, m, chunks, F, I, W) -> seconds beyond one rank's work (`closed_forms.bubble`)."""
    in_flight: Callable[[Number, Number, Number, Number], Number]
    """(rank, p, m, chunks) -> most chunks with activations (`closed_forms.in_flight`)."""
    replicated_row: Callable[[int, Sequence[int], int], Row] | None = None
    """(stage, replicas of each stage, m) -> what the replicas of a stage do that take its
    microbatches in turn (`round_robin`); None: no table.
    """
    min_chunks: int = 1
    max_chunks: int | None = 1
    """None: any number."""
    is_v_shaped: bool = False
    """Stages run down the ranks and back up, else around and around."""
    splits_backward: bool = False
    """Backward is split into input gradient (I) and weight gradient (W)."""
    needs_multiple_of_ranks: bool = False
    """m is a multiple of p."""
    min_microbatches_per_rank: int = 0
    """m is at least this times p, on several ranks; 0: the pipeline need not fill."""
    pair_groups: bool = False
    """Each pair of ranks has a process group: in one, NCCL's order of transfers would cost time."""
    receives_early: bool = False
    """Receives are posted early on GPUs too, to hide transfers (`lowering.lower`)."""
    warm_up: Callable[[Sequence[int]], tuple[int, ...]] | None = None
    """Replicas of each stage that take turns -> microbatches in flight by stage, whose rows are
    `row_with_warm_up`; None: the rows are others.
    """
    last_rank_has_most: bool = False
    """While the pipeline fills, later ranks have more activations; elsewhere earlier ones do."""

    def takes_microbatches(self, ranks: int, microbatches: int) -> bool:
        """Whether the schedule runs this many microbatches on `ranks` ranks."""
        if ranks == 1:
            return True
        if self.needs_multiple_of_ranks and microbatches % ranks:
            return False
        return microbatches >= self.min_microbatches_per_rank * ranks


def larger(a: Number, b: Number) -> Number:
    """max(a, b) of numbers or arrays."""
    return (a + b + abs(a - b)) / 2


def smaller(a: Number, b: Number) -> Number:
    """min(a, b) of numbers or arrays."""
    return (a + b - abs(a - b)) / 2


def longest(paths: Paths, f: Number, i: Number, w: Number) -> Number:
    """Seconds of the longest path, if a chunk's F, I and W take `f`, `i` and `w`."""
    return reduce(larger, (a * f + b * i + c * w for a, b, c in paths))


def unsplit_bubble(p: Number, m: Number, chunks: Number, f: Number, i: Number, w: Number) -> Number:
    """(p - 1) (F + I + W) / chunks: GPipe, 1F1B and interleaved 1F1B (2104.04473, section 2.2)."""
    return (p - 1) * (f + i + w) / chunks
