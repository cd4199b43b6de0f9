"""What of ZeRO's working set is there at which instant, in the workbench's own engine.

`instants.working` counts the most that is there at once; other stacks hold that throughout.
"""

from __future__ import annotations

import numpy as np

from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_parameters import ParamCounts
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.activation_memory import has_tied_head_on_rank, has_weight_gradients
from workbench.costmodel.memory.live_sets import MemoryByCategory, zero_working_set

PHASES_BEFORE_LAYER_BACKWARD = (
    "first_forward",
    "forward",
    "product",
    "loss",
    "projection",
    "final_norm",
)
"""Instants at which backward has not yet come to a layer."""


def zero_buffer_deltas(w: Workload, p: ParamCounts) -> dict[str, MemoryByCategory]:
    """Instant -> what is there more (or less) than `instants.working` says, bytes by category;
    nothing elsewhere.
    """
    if w.fixed.stack != "workbench" or w.zero < 2:
        return {}
    most = zero_working_set(w, p)
    layer = _layer_phase(w, p)
    backward = (
        "layer",
        "columns",
        "norm",
        *(("attention", "first_norm") if w.fixed.splits_backward else ()),
    )
    sets = {
        **dict.fromkeys(PHASES_BEFORE_LAYER_BACKWARD, _head_phase(w, p)),
        **dict.fromkeys(backward, layer),
        "embedding": _embedding_phase(w, p),
    }
    return {
        name: {category: live[category] - most[category] for category in most}
        for name, live in sets.items()
    }


def _keeps_gathered(w: Workload) -> Number:
    return np.maximum(w.searched.keep_gathered, w.pipeline > 1) if w.zero == 3 else 1.0


def _gathered_bytes(w: Workload, p: ParamCounts, units: Number) -> Number:
    """Bytes of gathered parameters, where `units` of them are."""
    return (
        (w.zero == 3)
        * w.element_bytes
        * np.where(_keeps_gathered(w) > 0, p.total, np.minimum(units, p.total))
    )


def _head_phase(w: Workload, p: ParamCounts) -> MemoryByCategory:
    """The last unit (with a tied table the embedding too), and the layers before it on their way;
    no gradient.
    """
    table = w.vocab_rows * w.weight_in_dim
    beside = (
        w.has_embedding * (p.total - w.layers * p.layer - table) * float(has_tied_head_on_rank(w))
    )
    return {
        "gathered": w.zeros
        + _gathered_bytes(
            w, p, w.has_head * table + beside + (w.fixed.num_zero_in_flight - 1) * p.layer
        ),
        "communication": w.zeros,
    }


def _layer_phase(w: Workload, p: ParamCounts) -> MemoryByCategory:
    """A layer and the next on their way; the gradient of a layer, and of what is still being
    reduced: the head.
    """
    made = np.minimum(w.searched.bucket_bytes / w.gradient_element_bytes, p.trained)
    if w.zero == 3:
        made = p.layer + (
            w.fixed.num_zero_in_flight > 1
        ) * w.has_head * w.vocab_rows * w.weight_in_dim * (1 - float(has_tied_head_on_rank(w)))
    return {
        "gathered": w.zeros + _gathered_bytes(w, p, w.fixed.num_zero_in_flight * p.layer),
        "communication": w.zeros + _gradient_bytes(w, made),
    }


def _embedding_phase(w: Workload, p: ParamCounts) -> MemoryByCategory:
    """Nothing that is gathered for a table; the gradients in flight, or all where a pipeline's are
    together.
    """
    table, most = w.has_embedding * w.vocab_rows * w.weight_in_dim, w.fixed.num_zero_in_flight
    each = (
        (most - 1) * p.layer + table
        if w.zero == 3
        else most * w.searched.bucket_bytes / w.gradient_element_bytes
    )
    made = p.trained if w.pipeline > 1 else np.minimum(p.trained, each)
    return {
        "gathered": w.zeros + _gathered_bytes(w, p, w.zeros),
        "communication": w.zeros + _gradient_bytes(w, made),
    }


def _gradient_bytes(w: Workload, elements: Number) -> Number:
    return elements * w.gradient_element_bytes * w.reduce_microbatch * has_weight_gradients(w)
