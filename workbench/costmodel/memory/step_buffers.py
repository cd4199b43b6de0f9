"""Buffers that live throughout forward and backward: all-gathered parameters and sequences, reduce
buckets.
"""

from __future__ import annotations

import numpy as np

from workbench.costmodel.communication.gradient_buffers import buffers_on_tape
from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.parameter_tensors import tile_elements
from workbench.costmodel.inputs.rank_parameters import ParamCounts
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory import activation_memory
from workbench.costmodel.memory.live_sets.stage_phases import MemoryByCategory, add_categories
from workbench.plan.model.block_linears import first_backward_layer


def step_buffers(w: Workload, p: ParamCounts) -> MemoryByCategory:
    """Buffers live throughout forward and backward: all-gathered parameters and sequences, reduce
    buckets.
    """
    framework, buffers = w.fixed.framework, zero_working_set(w, p)
    gathered = framework.model_parallel.gathered_buffers
    sequences = gathered * w.hidden_activation_bytes * (w.sequence_parallel > 1)
    buckets = framework.data_parallel.bucket_bytes(w.fixed.precision, w.zero)
    if not (gathered or buckets):
        return buffers
    return add_categories(buffers, {"communication": w.zeros + sequences + buckets})


def zero_working_set(w: Workload, p: ParamCounts) -> MemoryByCategory:
    """ZeRO-3's working set: all-gathered units and the gradient of one unit before its
    reduce-scatter.

    Two units are all-gathered at once (one in use, one prefetched), or all where they stay
    unsharded between forward and backward. ZeRO-2 has one reduce bucket.
    """
    if w.zero < 2:
        return {}
    if w.fixed.traced is not None:
        return _whole_module(w, p)
    counted = w.reduce_microbatch * (not buffers_on_tape(w))
    if w.zero == 2:
        most = np.minimum(w.searched.bucket_bytes, p.trained * w.gradient_element_bytes)
        return {"communication": most * counted}
    if w.fixed.tile_factor > 1:
        return _tiled_working_set(w, p)
    unit: Number = np.maximum(p.layer, np.maximum(w.has_embedding, w.has_head) * (w.table_params))
    if w.fixed.framework.data_parallel.ends_are_units:
        ends = p.total - w.layers * p.layer
        apart = 1 + w.has_embedding * w.has_head * (
            1 - float(activation_memory.has_tied_head_on_rank(w))
        )
        unit = np.maximum(unit, np.maximum(w.has_embedding, w.has_head) * ends / apart)
    if w.fixed.framework.data_parallel.gathered_root:
        unit = (
            w.vocab_rows
            * w.weight_in_dim
            * (
                w.has_embedding
                + w.has_head * (1 - float(activation_memory.has_tied_head_on_rank(w)))
            )
            + p.layer
        )
    limit = w.fixed.framework.data_parallel.gathered_parameters
    keeps_gathered = np.maximum(w.searched.keep_gathered, w.pipeline > 1)
    window = unit + (w.fixed.num_zero_in_flight - 1) * p.layer
    units = np.where(keeps_gathered > 0, p.total, np.minimum(p.total, np.minimum(window, limit)))
    unit = np.minimum(unit, limit)
    if p.frozen:
        unit = p.trained_layer
    gradient = unit * w.gradient_element_bytes * counted
    return {"gathered": units * w.element_bytes, "communication": w.zeros + gradient}


def most_gathered(w: Workload, p: ParamCounts, gathered: Array) -> Array:
    """Bytes of the most that ZeRO-3 has all-gathered at once, given that of its working set.

    Backward ends with the first layer that has an adapter. That one and those prefetched in front
    of it stay for the next microbatch's forward, which gathers others in front of them.
    """
    kept = np.maximum(w.searched.keep_gathered, w.pipeline > 1)
    if not p.frozen or w.zero < 3 or w.fixed.tile_factor > 1:
        return gathered
    flight = w.fixed.num_zero_in_flight
    first = first_backward_layer(w.fixed.adapted, len(w.fixed.adapted))
    frozen = p.layer - p.trained_layer
    layers = min(first + 1, 2 * flight) * frozen
    with_table = min(first + 1, 2 * flight - 1) * frozen + w.has_embedding * w.table_params
    units = p.trained_layer + np.maximum(layers, with_table)
    units = units * (first > 0) * (w.microbatches > 1) * (1 - kept)
    return np.asarray(np.maximum(gathered, units * w.element_bytes))


def _tiled_working_set(w: Workload, p: ParamCounts) -> MemoryByCategory:
    """The same where linears are gathered tile by tile: in the last layer's forward its tiles,
    what else it has, and the head in flight; gradients are counted phase by phase (`zero_buffers`).
    """
    tiled, largest = tile_elements(w)
    flight, own = w.fixed.num_zero_in_flight, p.total - w.layers * p.layer
    tied = float(activation_memory.has_tied_head_on_rank(w))
    ends = np.maximum(w.has_embedding, w.has_head) * own
    ends = ends / (1 + w.has_embedding * w.has_head * (1 - tied))
    ahead = (flight > 1) * flight * largest  # tiles of the last layer, before the head is needed
    gathered = np.maximum(
        ends + (flight - 1) * (p.layer - tiled) + ahead, p.layer - tiled + largest
    )
    return {"gathered": w.element_bytes * (w.zeros + gathered), "communication": w.zeros}


def _whole_module(w: Workload, p: ParamCounts) -> MemoryByCategory:
    """The same of a user's module: nothing says when each part of it computes, so that ZeRO-3
    gathers all of it. Unsharded gradients are counted as backward allocates them
    (`traced/gradient_buffers.py`).
    """
    return {"gathered": w.zeros + (w.zero == 3) * w.element_bytes * p.total}
