"""ZeRO gather and reduce buffers live at each phase of the step, where frameworks free them.

`step_buffers` counts the most that is live at once; frameworks that do not say when they
free buffers are taken to hold that throughout.
"""

from __future__ import annotations

import numpy as np

from workbench.costmodel.communication.gradient_buffers import buffers_on_tape
from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.operator_strategies import stage_parameters
from workbench.costmodel.inputs.parameter_tensors import tile_elements
from workbench.costmodel.inputs.rank_parameters import ParamCounts
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.activation_memory import (
    embedding_backward,
    has_tied_head_on_rank,
    has_weight_gradients,
    last_layer_activations,
)
from workbench.costmodel.memory.live_sets.stage_phases import MemoryByCategory
from workbench.costmodel.memory.step_buffers import zero_working_set

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
    """Phase -> how much more (or less) is live than `step_buffers` counts, bytes by
    category; empty below ZeRO-2, and where buffers are not freed.
    """
    frees = w.fixed.framework.data_parallel.frees_buffers and w.fixed.traced is None
    if not frees or w.zero < 2:
        return {}
    counted = zero_working_set(w, p)
    head, layer = _head_phase(w, p), _layer_phase(w, p)
    backward = (
        "feed_forward",
        "column_parallel",
        "norm",
        *(("attention",) if w.fixed.framework.kernels.counts_operators else ()),
        *(("output_norm",) if w.shape.norms_outputs else ()),
        *(("split_attention", "first_norm") if w.fixed.splits_backward else ()),
    )
    by_phase = {
        **dict.fromkeys(PHASES_BEFORE_LAYER_BACKWARD, head),
        "projection": head | {"communication": w.zeros + _projection_bucket(w, p)},
        "final_norm": head | {"communication": w.zeros + _head_bucket(w, p)},
        "head_forward": _head_phase(w, p, num_layers=0),
        **dict.fromkeys(backward, layer),
        **(_tiled_phases(w, p) if w.fixed.tile_factor > 1 else {}),
        "embedding": _embedding_phase(w, p),
    }
    return {
        name: {category: live[category] - counted[category] for category in counted}
        for name, live in by_phase.items()
    }


def _tiled_phases(w: Workload, p: ParamCounts) -> dict[str, MemoryByCategory]:
    """Phases in which a layer's tiles are gathered, beside what else it has.

    Backward frees a tile before it allocates its gradient: then those in flight are gathered but
    one, and as many gradients are there.
    """
    tiled, tile = tile_elements(w)
    flight, rest = w.fixed.num_zero_in_flight, p.layer - tiled
    pending = flight - 1
    head = w.has_head * w.head_params * (1 - float(has_tied_head_on_rank(w)))
    leaving = w.searched.offload_optimizer * tile * (w.searched.shard > 1) / w.searched.shard
    behind = pending * tile + leaving * (1 + (w.microbatches > 1)) * (pending > 0)
    gradients = rest + tile + np.maximum((pending > 0) * head, behind)
    gathered = _gathered_bytes(w, p, flight * rest + pending * tile)
    backward: MemoryByCategory = {
        "gathered": w.zeros + gathered,
        "communication": w.zeros + _gradient_bytes(w, gradients),
    }
    forward = _head_phase(w, p)
    ahead = min(flight, w.fixed.tile_factor) * tile * w.element_bytes
    forward["gathered"] = forward["gathered"] + ahead
    layer = ("feed_forward", "column_parallel", "norm", "attention", "recomputed_layer")
    return {"last_gemm": forward, **dict.fromkeys(layer, backward)}


def _unit(w: Workload, p: ParamCounts) -> Number:
    """Elements of a layer that are gathered before it computes: all, or what no tile has."""
    return p.layer - tile_elements(w)[0]


def _last_reduced(w: Workload, p: ParamCounts) -> Number:
    """Elements of the layer's bucket that is reduced last, or of the largest behind it."""
    tiled, largest = tile_elements(w)
    if not has_weight_gradients(w):
        return p.trained_layer
    rest: Number = np.maximum(p.layer - tiled, largest * (w.fixed.num_zero_in_flight > 2))
    return rest


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
    """The last unit (with a tied weight what lies in its bucket too) and the prefetched layers, or
    `num_layers` of them; no gradient yet.
    """
    layers = w.fixed.num_zero_in_flight - 1 if num_layers is None else num_layers
    table = w.head_params
    rest = w.has_embedding * (p.total - w.layers * p.layer - table) * _beside_table(w)
    return {
        "gathered": w.zeros
        + _gathered_bytes(w, p, w.has_head * table + rest + layers * _unit(w, p)),
        "communication": w.zeros,
    }


def _beside_table(w: Workload) -> Number:
    """Share of what follows the embedding table that a tied head gathers with it: what lies in the
    same bucket, for its gradient is summed over the same ranks.
    """
    if not has_tied_head_on_rank(w):
        return 0.0
    if w.fixed.operators is not None:
        table, *rest = stage_parameters(w.fixed.operators, w.shape, (), True, False)
        beside = sum(p.elements for p in rest if p.partial_over == table.partial_over)
        return beside / max(1, sum(p.elements for p in rest))
    return float(w.fixed.algorithm == "1d") * (1 - w.searched.sequence * (w.tensor > 1))


def _projection_bucket(w: Workload, p: ParamCounts) -> Number:
    """Bytes more than the logits', once these are freed: the head's gradient is copied into its
    bucket.
    """
    logits = w.element_bytes * w.vocab_rows * w.tokens
    more: Number = np.maximum(0.0, _head_bucket(w, p) - logits)
    return more


def _head_bucket(w: Workload, p: ParamCounts) -> Number:
    """Bytes of the bucket of the head's gradient, its own or one with those of layers; a tied one
    waits for the embedding's.
    """
    own = _own_bucket(w, w.head_params)
    shared = np.minimum(_bucket_elements(w), p.trained)
    untied = w.has_head * has_weight_gradients(w) * (1 - float(has_tied_head_on_rank(w)))
    return _gradient_bytes(w, untied * np.where(own > 0, own, shared))


def _own_bucket(w: Workload, elements: Number) -> Number:
    """`elements` of a tensor that has a bucket to itself: of a unit, or larger than a bucket."""
    return elements * (w.zero == 3 or elements > _bucket_elements(w))


def _bucket_elements(w: Workload) -> Number:
    return w.searched.bucket_bytes / w.gradient_element_bytes


def _layer_phase(w: Workload, p: ParamCounts) -> MemoryByCategory:
    """A layer and the prefetched ones; the gradient of a layer and, still being reduced, the
    head's, or where that is more those of the layers behind it, whose activations are freed.
    """
    gradients = np.minimum(_bucket_elements(w), p.trained)
    if w.zero == 3:
        pending = w.fixed.num_zero_in_flight - 1
        untied = has_weight_gradients(w) * (1 - float(has_tied_head_on_rank(w)))
        head = w.has_head * w.head_params * untied
        gradients = p.trained_layer + np.maximum(
            (pending > 0) * head, _layers_behind(w, p, pending)
        )
    elif (matrix := _largest_matrix(w)) is not None:
        gradients = np.where(
            matrix > _bucket_elements(w), w.fixed.num_zero_in_flight * matrix, gradients
        )
    return {
        "gathered": w.zeros + _gathered_bytes(w, p, w.fixed.num_zero_in_flight * p.layer),
        "communication": w.zeros + _gradient_bytes(w, gradients),
    }


def _layers_behind(w: Workload, p: ParamCounts, pending: int) -> Number:
    """Elements of gradients of `pending` layers, and of shards on their way to the host and, of
    former microbatches, from there, less what their activations took; a pipeline reduces all
    layers together.
    """
    saved = last_layer_activations(w)
    freed = np.where(w.recomputed_layers > 0, saved.checkpoint, saved.saved)
    shared = (w.searched.shard > 1) / w.searched.shard
    leaving = w.searched.offload_optimizer * p.trained_layer * shared
    number = np.minimum(pending, np.maximum(0, w.layers - 1)) * (w.pipeline == 1)
    each = p.trained_layer - freed / w.gradient_element_bytes
    behind = number * each + leaving * (number > 0) * (1 + (w.microbatches > 1))
    most: Number = np.maximum(0.0, behind)
    return most


def _largest_matrix(w: Workload) -> Number | None:
    """Elements of a layer's largest matrix with a gradient; None on a grid, where each rank has
    another, and of adapters, whose buckets hold many.
    """
    if w.fixed.grid is not None or w.fixed.adapter_rank:
        return None
    width = w.weight_in_dim / w.tiling.hidden_parts * w.tiling.in_dim_share
    moe = w.shape.moe
    experts = width * w.expert_ffn * moe.experts / w.searched.expert if moe else 0.0
    largest: Number = np.maximum(width * w.ffn, experts)
    return largest


def _embedding_phase(w: Workload, p: ParamCounts) -> MemoryByCategory:
    """Nothing is all-gathered for the embedding; gradients in flight, or all of them where a
    pipeline reduces them together.
    """
    table = w.has_embedding * w.vocab_rows * w.weight_in_dim * has_weight_gradients(w)
    pending = w.fixed.num_zero_in_flight - 1
    if w.zero == 3:
        in_flight = pending * _last_reduced(w, p) + table
    else:
        # A table in a bucket of its own is copied there when a tied head's gradient has been added.
        own, tied = _own_bucket(w, table), float(has_tied_head_on_rank(w))
        bucket = np.where(own > 0, own * (1 - tied), _bucket_elements(w))
        in_flight = pending * _bucket_elements(w) + bucket
    gradients = p.trained if w.pipeline > 1 else np.minimum(p.trained, in_flight)
    return {
        "gathered": w.zeros + _gathered_bytes(w, p, w.zeros),
        "communication": w.zeros + _gradient_bytes(w, gradients) + _former_bytes(w, p, table),
    }


def _former_bytes(w: Workload, p: ParamCounts, table: Number) -> Number:
    """Under offload, the last bucket's gradients of former microbatches, brought from the host to
    add to them; beyond what the embedding's backward has freed by then.
    """
    bucket = table
    if w.zero < 3:
        bucket = np.minimum(p.trained, np.maximum(_bucket_elements(w), table))
    former = _gradient_bytes(w, bucket) / w.searched.shard
    later = w.searched.offload_optimizer * (w.microbatches > 1)
    return later * np.maximum(0.0, former - embedding_backward(w))


def _gradient_bytes(w: Workload, elements: Number) -> Number:
    counted = w.reduce_microbatch * (not buffers_on_tape(w))
    return elements * w.gradient_element_bytes * counted
