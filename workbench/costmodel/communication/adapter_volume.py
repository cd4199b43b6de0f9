"""Collectives of tensor parallelism beside frozen weights, where adapters alone are trained (LoRA,
2106.09685).

Inputs that have no gradient are not reduced, and without gradients of weights backward all-gathers
no input again. With sequence parallelism x A^T of the column-parallel linears of one input is
all-gathered, [tokens, rank] of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from workbench.costmodel.communication.collective_call import (
    CollectiveCall,
    latents_are_apart,
    width_norm_calls,
)
from workbench.costmodel.inputs.adapted_layers import AdaptedLayer, adapted_layers
from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload


def adapter_collectives(w: Workload) -> list[CollectiveCall]:
    """All of a step on the tensor axis but those of the loss and of gradients."""
    kinds = adapted_layers(w)
    backward = sum((count for kind, count in kinds if kind.has_backward), w.zeros)
    found = _ends(w, float(backward.any()))
    for kind, count in kinds:
        # Which of a rank's layers are recomputed makes no difference.
        share = w.recomputed_layers / (backward + (backward == 0)) * kind.has_backward
        found += _of_layer(w, kind, w.microbatches * count, share)
    return [*found, *width_norm_calls(w)]


def _ends(w: Workload, trains: float) -> list[CollectiveCall]:
    """Of embedding and head, whose tables are frozen."""
    m, on, off = w.microbatches, w.searched.sequence, 1 - w.searched.sequence
    first, last = m * w.has_embedding, m * w.has_head
    call = partial(_call, w, w.hidden_activation_bytes)
    return [
        call("all_reduce", off * first, "F"),
        call("reduce_scatter", on * first, "F"),
        call("all_gather", on * last, "F"),
        call("all_reduce", off * last * trains, "B"),
        call("reduce_scatter", on * last * trains, "B"),
    ]


def _call(w: Workload, size: Number, kind: str, count: Number, action: str) -> CollectiveCall:
    return CollectiveCall("tensor", kind, w.tensor, w.dtype, size, count, action)


def _of_layer(
    w: Workload, kind: AdaptedLayer, times: Number, recomputed: Number
) -> list[CollectiveCall]:
    """Of layers of one kind.

    Args:
        w: Per-rank problem sizes.
        kind: The kind.
        times: Microbatches times layers.
        recomputed: Share of them that are recomputed.
    """
    on, off = w.searched.sequence, 1 - w.searched.sequence
    outputs = [
        kind.has_attention_backward or bool(kind.of("attention.o")),
        kind.has_branch_gradient or bool(kind.of("mlp.")),
    ]
    inputs = [kind.has_input_gradient, kind.has_branch_gradient]
    num_gathered = 2
    if latents_are_apart(w) and w.shape.mla is not None and w.shape.mla.q_rank:
        inputs, num_gathered = inputs[1:], 1  # latents alone are read by attention's columns
    repeated = 2 if w.shape.norms_outputs else w.fixed.framework.recompute.repeated_all_reduces
    again = repeated * recomputed * times
    call = partial(_call, w, w.hidden_activation_bytes)
    reduced = times * sum(inputs) + again
    gathered = times * sum(outputs) + num_gathered * recomputed * times
    return [
        call("all_reduce", off * 2 * times, "F"),
        call("all_reduce", off * reduced, "B"),
        call("all_gather", on * num_gathered * times, "F"),
        call("reduce_scatter", on * 2 * times, "F"),
        call("all_gather", on * gathered, "B"),
        call("reduce_scatter", on * reduced, "B"),
        *_thin(w, kind, times, recomputed),
        *_latents(w, kind, times, recomputed),
        *_shared_heads(w, kind, times),
    ]


def _thin(
    w: Workload, kind: AdaptedLayer, times: Number, recomputed: Number
) -> Iterator[CollectiveCall]:
    """All-gathers of x A^T of column-parallel linears that read one input, and their backward."""
    times = times * w.searched.sequence
    for names in _column_groups(w):
        if own := [name for name in names if name in kind.adapted]:
            call = partial(_call, w, w.tokens * len(own) * w.fixed.adapter_rank * w.element_bytes)
            yield call("all_gather", times, "F")
            yield call("all_gather", times * recomputed, "B")
            yield call("reduce_scatter", times, "B")


def _column_groups(w: Workload) -> list[tuple[str, ...]]:
    """Names in a block of the column-parallel linears that read one input; those of an MoE layer
    read one that is all-gathered already.
    """
    mlp = ("mlp.gate", "mlp.up")
    if w.shape.mla is None:
        return [("attention.q", "attention.k", "attention.v"), mlp]
    return [("attention.q",), ("attention.kv_up",), mlp]


def _latents(
    w: Workload, kind: AdaptedLayer, times: Number, recomputed: Number
) -> Iterator[CollectiveCall]:
    """Of latents and the rotary key, which every tensor rank projects itself."""
    mla = w.shape.mla
    if mla is None or not latents_are_apart(w):
        return
    on, off = w.searched.sequence, 1 - w.searched.sequence
    for width, name in (
        (mla.q_rank or 0, "attention.q_down"),
        (mla.kv_rank, "attention.kv_down"),
        (mla.rope_dim, "attention.kv_down"),
    ):
        call = partial(_call, w, w.tokens * width * w.element_bytes)
        reduced = times * (kind.has_input_gradient or name in kind.adapted)
        yield call("all_reduce", off * reduced, "B")
        yield call("all_gather", on * times, "F")
        yield call("all_gather", on * times * recomputed, "B")
        yield call("reduce_scatter", on * reduced, "B")


def _shared_heads(w: Workload, kind: AdaptedLayer, times: Number) -> Iterator[CollectiveCall]:
    """All-reduces of gradients of B, where several ranks have the same key-value head."""
    if w.shape.mla is not None:
        return
    columns = w.tiling.column_parts
    size = w.shape.kv_width * w.fixed.adapter_rank * w.element_bytes
    shared = times * (columns > int(w.shape.kv_heads or 0))
    for name in ("attention.k", "attention.v"):
        if name in kind.adapted:
            yield CollectiveCall("tensor", "all_reduce", columns, w.dtype, size, shared, "B")
