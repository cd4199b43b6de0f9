"""ZeRO gather and reduce buffers live at each phase of the step, where frameworks free them.

`live_sets.step_buffers` counts the most that is live at once; frameworks that do not say when they
free buffers are taken to hold that throughout.
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
    "last_gemm",
    "loss",
    "projection",
    "final_norm",
)
"""Phases before the first backward of a layer."""


def zero_buffer_deltas(w: Workload, p: ParamCounts) -> dict[str, MemoryByCategory]:
    """Phase -> how much more (or less) is live than `live_sets.step_buffers` counts, bytes by
    category; empty below ZeRO-2, and where buffers are not freed.
    """
    frees = w.fixed.framework.data_parallel.frees_buffers and w.fixed.traced is None
    if not frees or w.zero < 2:
        return {}
    counted = zero_working_set(w, p)
    layer = _layer_phase(w, p)
    backward = (
        "feed_forward",
        "column_parallel",
        "norm",
        *(("attention",) if w.fixed.framework.kernels.counts_operators else ()),
        *(("split_attention", "first_norm") if w.fixed.splits_backward else ()),
    )
    by_phase = {
        **dict.fromkeys(PHASES_BEFORE_LAYER_BACKWARD, _head_phase(w, p)),
        "head_forward": _head_phase(w, p, num_layers=0),
        **dict.fromkeys(backward, layer),
        "embedding": _embedding_phase(w, p),
    }
    return {
        name: {category: live[category] - counted[category] for category in counted}
        for name, live in by_phase.items()
    }


def _keeps_gathered(w: Workload) -> Number:
    """1 where parameters stay unsharded from forward to backward."""
    return np.maximum(w.searched.keep_gathered, w.pipeline > 1) if w.zero == 3 else 1.0


def _gathered_bytes(w: Workload, p: ParamCounts, units: Number) -> Number:
    """Bytes of all-gathered parameters, where `units` parameters are needed at once."""
    return (
        (w.zero == 3)
        * w.element_bytes
        * np.where(_keeps_gathered(w) > 0, p.total, np.minimum(units, p.total))
    )


def _head_phase(w: Workload, p: ParamCounts, num_layers: int | None = None) -> MemoryByCategory:
    """The last unit (with a tied weight the embedding too) and the prefetched layers, or
    `num_layers` of them; no gradient yet.
    """
    layers = w.fixed.num_zero_in_flight - 1 if num_layers is None else num_layers
    table = w.head_params
    rest = (
        w.has_embedding * (p.total - w.layers * p.layer - table) * float(has_tied_head_on_rank(w))
    )
    return {
        "gathered": w.zeros + _gathered_bytes(w, p, w.has_head * table + rest + layers * p.layer),
        "communication": w.zeros,
    }


def _layer_phase(w: Workload, p: ParamCounts) -> MemoryByCategory:
    """A layer and the prefetched ones; the gradient of a layer and, still being reduced, the
    head's.
    """
    gradients = np.minimum(w.searched.bucket_bytes / w.gradient_element_bytes, p.trained)
    if w.zero == 3:
        gradients = p.layer + (w.fixed.num_zero_in_flight > 1) * w.has_head * w.head_params * (
            1 - float(has_tied_head_on_rank(w))
        )
    return {
        "gathered": w.zeros + _gathered_bytes(w, p, w.fixed.num_zero_in_flight * p.layer),
        "communication": w.zeros + _gradient_bytes(w, gradients),
    }


def _embedding_phase(w: Workload, p: ParamCounts) -> MemoryByCategory:
    """Nothing is all-gathered for the embedding; gradients in flight, or all of them where a
    pipeline reduces them together.
    """
    table, num_buckets = (
        w.has_embedding * w.vocab_rows * w.weight_in_dim,
        w.fixed.num_zero_in_flight,
    )
    in_flight = (
        (num_buckets - 1) * p.layer + table
        if w.zero == 3
        else num_buckets * w.searched.bucket_bytes / w.gradient_element_bytes
    )
    gradients = p.trained if w.pipeline > 1 else np.minimum(p.trained, in_flight)
    return {
        "gathered": w.zeros + _gathered_bytes(w, p, w.zeros),
        "communication": w.zeros + _gradient_bytes(w, gradients),
    }


def _gradient_bytes(w: Workload, elements: Number) -> Number:
    return elements * w.gradient_element_bytes * w.reduce_microbatch * has_weight_gradients(w)
