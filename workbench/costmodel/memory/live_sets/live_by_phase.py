"""Live sets: phases of a step at which memory can peak, and what is live then besides model
states.
"""

from __future__ import annotations

import numpy as np

from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_parameters import ParamCounts
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory import activation_memory
from workbench.costmodel.memory.activation_memory import layer_activations
from workbench.costmodel.memory.live_sets.activations_in_flight import activations_in_flight
from workbench.costmodel.memory.live_sets.operator_live_sets import operator_live_sets
from workbench.costmodel.memory.live_sets.several_stages import (
    has_several_stages,
    several_stages_live_sets,
)
from workbench.costmodel.memory.live_sets.stage_phases import (
    MemoryByCategory,
    add_categories,
    backward_phases,
    forward_phases,
)
from workbench.costmodel.memory.loss_memory import head_memory
from workbench.costmodel.memory.traced_states import bucket_elements

PHASES_WITH_ALL_GRADIENTS = ("embedding", "optimizer")
"""Phases at which all gradients exist, whatever the framework."""


def gradients_persist(w: Workload) -> Number:
    """1 where gradients exist from the start of the step, 0 where its only backward allocates
    them.
    """
    if not w.fixed.framework.model_states.frees_gradients:
        return 1.0
    return np.where(w.microbatches > 1, 1.0, 0.0)


def live_by_phase(w: Workload) -> dict[str, MemoryByCategory]:
    """Activations, logits and temporaries live at each phase of forward and backward that can be
    the peak.

    Returns:
        Phase -> category -> bytes by pipeline rank; `first_forward` is the state after the first
        microbatch's forward.
    """
    if w.fixed.grid is not None:
        return operator_live_sets(w)
    if has_several_stages(w):
        return several_stages_live_sets(w)
    is_split, is_moe = w.fixed.splits_backward, w.shape.moe is not None
    head, layer = head_memory(w), layer_activations(w, is_moe, is_split)
    flight = activations_in_flight(w, head)
    full = {"activations": flight.total, "logits": flight.logits}
    return {
        "first_forward": {name: size / w.microbatches_in_flight for name, size in full.items()},
        **forward_phases(w, head, layer, flight),
        **backward_phases(w, head, layer, flight, is_split),
    }


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
        return _whole_module(w)
    if w.zero == 2:
        return {
            "communication": np.minimum(
                w.searched.bucket_bytes, p.trained * w.gradient_element_bytes
            )
            * w.reduce_microbatch
        }
    unit = np.maximum(p.layer, np.maximum(w.has_embedding, w.has_head) * (w.table_params))
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
    gradient = (
        unit
        * w.gradient_element_bytes
        * w.reduce_microbatch
        * activation_memory.has_weight_gradients(w)
    )
    return {"gathered": units * w.element_bytes, "communication": w.zeros + gradient}


def _whole_module(w: Workload) -> MemoryByCategory:
    """The same of a user's module: nothing says when each part of it computes, so that ZeRO-3
    gathers all of it. Unsharded gradients are counted as backward allocates them
    (`traced/gradient_buffers.py`).
    """
    return {"gathered": w.zeros + (w.zero == 3) * w.element_bytes * bucket_elements(w)}
