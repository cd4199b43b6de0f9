"""Bytes that a rank sends, which payloads do not say: an all-reduce sends its tensor twice."""

from __future__ import annotations

from workbench.costmodel.communication.collective_cost import WIRE_FACTOR
from workbench.lab.charts.collectives import calls_of_busiest_rank
from workbench.profile import Profile


def bytes_sent(profile: Profile, *axes: str) -> float:
    """Bytes that the busiest rank sends in one step, collectives taken as rings.

    In a ring of n ranks each sends (n-1)/n of the tensor in a reduce-scatter, an all-gather or an
    all-to-all, and twice that in an all-reduce (Patarasuk and Yuan 2009).

    Args:
        profile: Of any instrument.
        axes: Axes of the mesh to count; default all of them.
    """
    total = 0.0
    for axis, kind, payload, _, ranks in calls_of_busiest_rank(profile):
        if not axes or axis in axes:
            total += payload * (kind == "send" or WIRE_FACTOR.get(kind, 0.0) * (ranks - 1) / ranks)
    return total
