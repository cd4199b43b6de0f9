"""Which sequences of a step a rank takes: whole microbatches of its data-parallel share, or where
each pipeline stage has replicas of its own its part of every microbatch (split; DAPPLE, 2007.01045)
or some of the microbatches (round robin; PipeDream, SOSP'19).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from workbench.plan.resolved_plan import ResolvedPlan

Part = tuple[int, int]
"""[start, stop) of consecutive items."""


class BatchShare(NamedTuple):
    """A rank's sequences of a global batch: `sequences` of each of its microbatches.

    Attributes:
        first: Index in the global batch of the first sequence of its first microbatch.
        stride: From a microbatch's first sequence to the next one's.
        sequences: In each microbatch.
        microbatches: Of a step, those that it takes.
    """

    first: int
    stride: int
    sequences: int
    microbatches: int

    def samples(self) -> list[list[int]]:
        """Indices in the global batch, [microbatches, sequences]."""
        starts = [self.first + self.stride * m for m in range(self.microbatches)]
        return [[start + i for i in range(self.sequences)] for start in starts]


def batch_share(plan: ResolvedPlan, replica: int, replicas: int) -> BatchShare:
    """The share of data-parallel index `replica` of `replicas`, those of its stage."""
    t, microbatches, pipeline = plan.task, plan.num_microbatches, plan.strategy.pipeline
    if pipeline.is_round_robin:
        own = len(range(replica, microbatches, replicas))
        return BatchShare(replica * t.micro_batch, replicas * t.micro_batch, t.micro_batch, own)
    if pipeline.replicas:
        start, stop = even_parts(t.micro_batch, replicas)[replica]
        return BatchShare(start, t.micro_batch, stop - start, microbatches)
    return data_share(t.global_batch, t.micro_batch, replica, replicas)


def data_share(global_batch: int, micro_batch: int, index: int = 0, size: int = 1) -> BatchShare:
    """The share of index `index` of a data axis of `size`: the so-many-th contiguous part."""
    microbatches, left = divmod(global_batch, micro_batch * size)
    assert not left and 0 <= index < size, (global_batch, micro_batch, index, size)
    return BatchShare(index * microbatches * micro_batch, micro_batch, micro_batch, microbatches)


def even_parts(items: int, parts: int) -> list[Part]:
    """Consecutive parts whose sizes differ by one at most, the larger first: 4 in 3 are 2, 1, 1."""
    small, larger = divmod(items, parts)
    starts = [part * small + min(part, larger) for part in range(parts + 1)]
    return list(pairwise(starts))


def stage_tokens(
    micro_batch: int, tokens: int, replicas: Sequence[int], shards: int = 1
) -> list[list[Part]]:
    """Which tokens of a microbatch the ranks of each stage have, as parts of [B, T] in memory
    order: replica by replica, and within one by sequence-parallel rank (2205.05198).

    Args:
        micro_batch: Sequences that the replicas of a stage share.
        tokens: Of a sequence.
        replicas: Of each stage.
        shards: Ranks over which a replica's tokens are sharded.
    """
    return [
        [
            (tokens * start + a, tokens * start + b)
            for start, stop in even_parts(micro_batch, count)
            for a, b in even_parts(tokens * (stop - start), shards)
        ]
        for count in replicas
    ]


def plan_stage_tokens(plan: ResolvedPlan) -> list[list[Part]]:
    """`stage_tokens` of a plan whose stages have replicas of their own: of the ranks with the same
    context index, and without sequence parallelism with the same tensor index.
    """
    s, t = plan.strategy, plan.task
    shards = s.tensor.ranks if s.tensor.sequence else 1
    length = t.sequence_length // s.context.size
    return stage_tokens(t.micro_batch, length, s.pipeline.replicas or [], shards)


def own_part(
    parts: Sequence[Sequence[Part]], replicas: Sequence[int], stage: int, replica: int, tensor: int
) -> Part:
    """The part of a rank, of `parts` by stage as `stage_tokens` gives them."""
    shards = len(parts[stage]) // replicas[stage]
    return parts[stage][replica * shards + tensor % shards]


def overlaps(own: Part, others: Sequence[Part]) -> list[tuple[int, Part]]:
    """Parts of `others` that `own` shares items with: (index, the items relative to `own`)."""
    start, stop = own
    shared = ((i, max(start, a), min(stop, b)) for i, (a, b) in enumerate(others))
    return [(i, (a - start, b - start)) for i, a, b in shared if a < b]
