"""Which rank stands where: the grid of ranks that an order of axes gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def coordinates(rank: int, sizes: Mapping[str, int], placement: Sequence[str]) -> dict[str, int]:
    """Coordinate of `rank` on each axis; `placement` names the axes, innermost (fastest-varying)
    first.
    """
    where = {}
    for axis in placement:
        rank, where[axis] = divmod(rank, sizes[axis])
    return where


def rank_at(where: Mapping[str, int], sizes: Mapping[str, int], placement: Sequence[str]) -> int:
    """The rank that stands at the coordinates `where`: the inverse of `coordinates`."""
    rank = 0
    for axis in reversed(placement):
        rank = rank * sizes[axis] + where[axis]
    return rank
