"""Attention heads of each tensor-parallel rank: whole key-value groups, or parts of one group.

Heads that the ranks do not divide are padded, so that every rank has as many.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from workbench.plan.model.model_shape import Shape


class HeadShard(NamedTuple):
    """Heads [start, stop) of one rank, without the padding."""

    query: tuple[int, int]
    kv: tuple[int, int]
    num_q_heads: int
    """Query heads of every rank, padding included."""
    num_kv_heads: int
    """Key-value heads of every rank, padding included."""
    kv_shard: int
    """Which of the `num_kv_shards` sets of key-value heads the rank has; beyond the last, none."""
    num_kv_shards: int
    """Distinct sets of key-value heads: as many as ranks, unless several ranks share one head."""


def padded_heads_per_rank(shape: Shape, ranks: Any) -> tuple[Any, Any]:
    """(query heads, key-value heads) of each rank, padding included.

    Where there are as many key-value heads as ranks or more, a rank has whole groups: ceil(kv /
    ranks) of them. Where there are fewer, floor(ranks / kv) ranks share the query heads of one
    key-value head. Multi-head latent attention has a key-value head for each query head.

    Args:
        shape: The model.
        ranks: Tensor-parallel ranks: a number, or an array of them.
    """
    kv = num_kv_heads(shape)
    groups, sharing = -(-kv // ranks), ranks // kv + (ranks < kv)
    return groups * -(-(shape.heads // kv) // sharing), groups


def num_kv_heads(shape: Shape) -> int:
    """Key-value heads that are sharded."""
    return shape.heads if shape.mla else int(shape.kv_heads or shape.heads)


def head_shard(shape: Shape, ranks: int, index: int) -> HeadShard:
    """The heads of rank `index` of `ranks`."""
    kv = num_kv_heads(shape)
    group, (padded, padded_kv) = shape.heads // kv, padded_heads_per_rank(shape, ranks)
    if kv >= ranks:
        first, last = min(index * padded_kv, kv), min((index + 1) * padded_kv, kv)
        query = (first * group, last * group)
        return HeadShard(query, (first, last), padded, padded_kv, index, ranks)
    head, part = divmod(index, ranks // kv)
    start, stop = (
        min(min(head, kv) * group + min(n * padded, group), shape.heads) for n in (part, part + 1)
    )
    kv_range = (min(head, kv), min(head + 1, kv))
    return HeadShard((start, stop), kv_range, padded, padded_kv, head, kv)
