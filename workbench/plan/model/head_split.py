"""How attention heads are dealt to tensor ranks, evenly or not: whole key-value groups, or parts of
one group each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from workbench.plan.model.model_shape import Shape


class Dealt(NamedTuple):
    """Heads [start, stop) of one rank. Every rank makes room for `room` query and `kv_room`
    key-value heads.
    """

    query: tuple[int, int]
    kv: tuple[int, int]
    room: int
    kv_room: int
    piece: int
    """Which of the `pieces` different sets of key-value heads it holds; beyond the last it holds
    none.
    """
    pieces: int
    """Different sets of key-value heads: as many as ranks, unless several ranks share one head."""


def rooms(shape: Shape, ranks: Any) -> tuple[Any, Any]:
    """(query heads, key-value heads) that each of `ranks` makes room for; what is beyond the
    shape's is padding.

    Where key-value heads are as many as ranks or more, a rank has whole groups: ceil(kv / ranks) of
    them. Where they are fewer, floor(ranks / kv) ranks share out the query heads of one key-value
    head. `ranks` is a number, or an array of them; multi-head latent attention has a key-value head
    a query head.
    """
    kv = kv_heads(shape)
    groups, sharing = -(-kv // ranks), ranks // kv + (ranks < kv)
    return groups * -(-(shape.heads // kv) // sharing), groups


def kv_heads(shape: Shape) -> int:
    """Key-value heads that are dealt out."""
    return shape.heads if shape.mla else int(shape.kv_heads or shape.heads)


def dealt(shape: Shape, ranks: int, index: int) -> Dealt:
    """The heads of rank `index` of `ranks`."""
    kv = kv_heads(shape)
    group, (room, kv_room) = shape.heads // kv, rooms(shape, ranks)
    if kv >= ranks:
        first, last = min(index * kv_room, kv), min((index + 1) * kv_room, kv)
        return Dealt((first * group, last * group), (first, last), room, kv_room, index, ranks)
    head, part = divmod(index, ranks // kv)
    start, stop = (
        min(min(head, kv) * group + min(n * room, group), shape.heads) for n in (part, part + 1)
    )
    return Dealt((start, stop), (min(head, kv), min(head + 1, kv)), room, kv_room, head, kv)
