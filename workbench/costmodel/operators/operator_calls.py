"""Collectives of operator strategies in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from workbench.costmodel.communication.collective_call import CollectiveCall, gradient_dtype_name
from workbench.costmodel.inputs.operator_stages import rank_parameters
from workbench.costmodel.inputs.operator_strategies import RankGrid, group_name
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.operators.symbolic_rank import AxisCall, GridCall
from workbench.costmodel.rank_passes import rank_passes


def operator_collectives(w: Workload) -> list[CollectiveCall]:
    """Calls over the axes of the grid that tensor ranks are, of all microbatches of a step."""
    named = w.fixed.grid
    assert named is not None
    by_rank: list[Counter[GridCall]] = [
        sum((stage.calls for stage in own), Counter[GridCall]()) for own in rank_passes(w)
    ]
    return [
        CollectiveCall(
            "tensor",
            call.kind,
            float(named.ranks_over(call.axes)),
            call.dtype,
            float(call.bytes),
            w.microbatches * np.array([float(calls[call]) for calls in by_rank]),
            call.action,
            group_name(call.axes),
        )
        for call in dict.fromkeys(call for calls in by_rank for call in calls)
    ] + list(_gradient_sums(w, named))


def axis_collectives(w: Workload, axis: str) -> list[CollectiveCall]:
    """Calls over another axis of the mesh, of all microbatches of a step."""
    by_rank: list[Counter[AxisCall]] = [
        sum((stage.axis_calls for stage in own), Counter[AxisCall]()) for own in rank_passes(w)
    ]
    return [
        CollectiveCall(
            axis,
            call.kind,
            call.group_size,
            call.dtype,
            call.bytes,
            w.microbatches * np.array([float(calls[call]) for calls in by_rank]),
            call.action,
            call.link,
        )
        for call in dict.fromkeys(call for calls in by_rank for call in calls)
        if call.axis == axis
    ]


def _gradient_sums(w: Workload, named: RankGrid) -> Iterator[CollectiveCall]:
    """Sums of the gradients of parameters whose modules shard rows, once a step: as one call for
    each axis, on what ZeRO leaves of them.
    """
    elements = [Counter[int]() for _ in w.places]
    for place, found in zip(w.places, elements):
        for p in rank_parameters(w.fixed, place.stage):
            for axis in p.partial_over:
                found[axis] += p.elements
    shard = w.searched.shard if w.zero else 1.0
    for axis in range(len(named.sides)):
        size = np.array([float(found[axis]) for found in elements]) * w.gradient_element_bytes
        yield CollectiveCall(
            "tensor",
            "all_reduce",
            float(named.sides[axis]),
            gradient_dtype_name(w),
            size / shard,
            1.0 * (size > 0),
            "REDUCE_GRAD",
            group_name((axis,)),
        )
