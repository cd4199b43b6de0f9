"""Collectives of operator strategies in a step."""

from __future__ import annotations

from collections import Counter

import numpy as np

from workbench.costmodel.communication.collective_call import CollectiveCall
from workbench.costmodel.inputs.operator_strategies import group_name
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
    ]


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
