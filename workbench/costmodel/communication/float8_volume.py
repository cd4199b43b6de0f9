"""All-reduces of the largest entries that fp8 scales are of (`parallel/float8`): a few fp32 numbers
for each group of GEMMs.
"""

from __future__ import annotations

from workbench.costmodel.communication.collective_call import CollectiveCall
from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload

BYTES = 4.0
"""Of a largest entry, fp32."""
QKV, ONE = 3.0, 1.0
"""Layers that share an input, and those that have their own: attention's output, `down`."""


def float8_collectives(w: Workload) -> list[CollectiveCall]:
    """All of a step; none where GEMMs are not fp8, or scales are not of whole tensors.

    Tensor ranks hold parts of weights, of row-parallel inputs and of column-parallel output
    gradients; context ranks parts of inputs and output gradients. Recomputed layers are cast again.
    """
    if w.fixed.precision != "fp8" or not w.fixed.framework.kernels.reduces_fp8_scales:
        return []
    wide, sharded = ONE + w.shape.gated, 1.0 * (w.tensor > 1)
    alone = (1 - sharded) * (
        QKV + wide + 2 * ONE
    )  # without groups every layer has calls of its own
    return [
        *_calls(w, "tensor", QKV, 1.0, 1.0),
        *_calls(w, "tensor", wide, 1.0, 1.0),
        *_calls(w, "tensor", 2.0, 2.0, 0.0),  # input and weight of a row-parallel layer
        *_calls(w, "context", QKV, 0.0, sharded),
        *_calls(w, "context", wide, 0.0, sharded),
        *_calls(w, "context", 1.0, sharded * 4 + alone, sharded * 2 + alone),
    ]


def _calls(
    w: Workload, axis: str, numbers: float, forward: Number, backward: Number
) -> list[CollectiveCall]:
    """All-reduces of so many numbers, by how many each layer has in forward and in backward."""
    size = w.tensor if axis == "tensor" else w.searched.context
    times, again = w.microbatches * w.layers, w.microbatches * w.recomputed_layers
    counts = {"F": times * forward, "B": again * forward + times * backward}
    return [
        CollectiveCall(axis, "all_reduce", size, "fp32", BYTES * numbers, count, action)
        for action, count in counts.items()
    ]
