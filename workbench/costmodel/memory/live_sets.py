"""Live sets: phases of a step at which memory can peak, and what is live then besides model
states.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.rank_parameters import ParamCounts
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory import activation_memory, attention_memory
from workbench.costmodel.memory.activation_memory import LayerActivations
from workbench.costmodel.memory.loss_memory import HeadMemory
from workbench.costmodel.memory.loss_memory import head_memory as head_of
from workbench.costmodel.memory.operator_live_sets import operator_live_sets
from workbench.costmodel.memory.traced_states import bucket_elements
from workbench.schedules import receives_early

MemoryByCategory = dict[str, Array]
"""Category -> bytes by pipeline rank."""


@dataclass(frozen=True)
class ActivationsInFlight:
    """Activations when most microbatches are in flight, bytes by pipeline rank."""

    total: Array
    """All saved activations."""
    logits: Array
    """Saved tensors of vocabulary width."""
    microbatch: Array
    """One microbatch through the layers of one stage."""
    deferred: Array
    """What those layers leave for a deferred W."""


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
    head, layer = (
        head_of(w),
        activation_memory.layer_activations(w, is_moe=w.shape.moe is not None),
    )
    flight = _activations_in_flight(w, head)
    full = {"activations": flight.total, "logits": flight.logits}
    return {
        "first_forward": {name: size / w.microbatches_in_flight for name, size in full.items()},
        "forward": add_categories(full, _forward_end(w, head, layer)),
        "last_gemm": _last_gemm(w, head, layer, flight),
        **_head_backward(w, head, flight),
        **_layer_backward(w, head, layer, flight),
    }


def _activations_in_flight(w: Workload, head: HeadMemory) -> ActivationsInFlight:
    """Sum the saved activations over the microbatches in flight (1F1B: p - r of them on rank r)."""
    dense, moe = (
        activation_memory.layer_activations(w),
        activation_memory.layer_activations(w, is_moe=w.shape.moe is not None),
    )
    share = np.divide(w.dense_layers, np.maximum(w.layers, 1))
    layer_saved = share * dense.saved + (1 - share) * moe.saved
    checkpoint = share * dense.checkpoint + (1 - share) * moe.checkpoint
    saved = (w.layers - w.recomputed_layers) * layer_saved + w.recomputed_layers * checkpoint
    ends, _ = activation_memory.boundary_bytes(w)
    per_microbatch = saved + ends
    if w.shape.mtp_layers:  # each norms its two inputs, and projects what it joins
        further = w.shape.mtp_layers * (2 + 2)
        per_microbatch = per_microbatch + w.has_head * further * w.residual_bytes
    deferred = (
        w.layers * activation_memory.deferred_weight_bytes(w) * float(w.fixed.splits_backward)
    )
    deferred_delta = w.deferred_microbatches * (deferred - saved) * float(w.fixed.splits_backward)
    # Losses of all tokens that are predicted have run before any backward of theirs.
    num_losses = w.losses_in_flight * w.has_head * (1 + w.shape.mtp_layers)
    total = (
        w.microbatches_in_flight * per_microbatch
        + num_losses * head.saved
        + _between_stages(w)
        + deferred_delta
    )
    return ActivationsInFlight(
        total, num_losses * head.logits, saved / w.fixed.chunks, deferred / w.fixed.chunks
    )


def _between_stages(w: Workload) -> Array:
    """Bytes of outputs on their way to other stages, and of inputs that came ahead."""
    _, boundary = activation_memory.boundary_bytes(w)
    outputs = boundary * (
        1
        + w.fixed.framework.model_parallel.keeps_sent_outputs
        * np.maximum(0.0, w.microbatches_in_flight - 1)
    )
    # The first that came ahead is there once an output has gone, which the last stage has none of:
    # there it comes after the backward, unless receives are posted early.
    first = 1 - w.has_head * receives_early(w.fixed.schedule)
    inputs = float(w.pipeline > 1) * w.residual_bytes * np.maximum(0.0, w.inputs_ahead - first)
    return np.asarray(outputs + inputs)


def _forward_end(w: Workload, head: HeadMemory, layer: LayerActivations) -> MemoryByCategory:
    """End of the last forward before a backward."""
    return {
        "logits": w.has_head * (head.forward - head.logits),
        "temporary": (1 - w.has_head) * layer.forward,
    }


def _last_gemm(
    w: Workload, head: HeadMemory, layer: LayerActivations, flight: ActivationsInFlight
) -> MemoryByCategory:
    """Last GEMM of the last layer's forward; neither the stage's output nor anything of the head
    is live.
    """
    _, boundary = activation_memory.boundary_bytes(w)
    return {
        "activations": flight.total - w.has_head * head.saved - boundary,
        "logits": flight.logits - w.has_head * head.logits,
        "temporary": w.zeros + layer.last_gemm,
    }


def _head_backward(
    w: Workload, head: HeadMemory, flight: ActivationsInFlight
) -> dict[str, MemoryByCategory]:
    """Backward of the loss, of the output projection (logits are freed) and of the final norm
    (what the head saved is freed).
    """
    logits = flight.logits - w.has_head * head.logits
    before = flight.total - w.has_head * head.saved
    return {
        "loss": {
            "activations": flight.total,
            "logits": flight.logits,
            "temporary": w.has_head * head.loss,
        },
        "projection": {
            "activations": flight.total,
            "logits": logits,
            "temporary": w.has_head * head.projection,
        },
        "final_norm": {
            "activations": before,
            "logits": logits,
            "temporary": w.has_head * head.norm + _tied_head_gradient(w),
        },
    }


def _layer_backward(
    w: Workload, head: HeadMemory, layer: LayerActivations, flight: ActivationsInFlight
) -> dict[str, MemoryByCategory]:
    """Backward of a stage's last layer, of a recomputed one, and of the embedding or the first
    norm.

    Full recompute restores the whole set of one layer, selective recompute what the layer did not
    save. Where the schedule splits backward, the phases of a separate W follow.
    """
    logits = flight.logits - w.has_head * head.logits
    before = flight.total - w.has_head * head.saved - _sent_before_backward(w)
    after = before - flight.microbatch + flight.deferred
    phases = _last_layer_backward(w, layer, before, logits) | {
        "recomputed_layer": _recomputed_layer_backward(w, layer, before, logits),
        "embedding": {
            "activations": after,
            "logits": logits,
            "temporary": w.has_embedding * activation_memory.embedding_backward(w)
            + (1 - w.has_embedding) * activation_memory.norm_backward(w),
            "communication": _received_gradient(w) * _holds_gradient(w),
        },
    }
    return phases | (_split_backward(w, after, logits) if w.fixed.splits_backward else {})


def _holds_gradient(w: Workload) -> bool:
    """Whether what a stage received is there until its backward returns: in this engine, where a
    rank has one stage whose backward is not split.
    """
    s = w.fixed
    return s.framework.kernels.counts_operators and s.chunks == 1 and not s.splits_backward


def _received_gradient(w: Workload) -> Array:
    """Output gradient that a stage without the head receives from the next one."""
    return np.asarray((1 - w.has_head) * w.residual_bytes)


def _last_layer_backward(
    w: Workload, layer: LayerActivations, before: Array, logits: Array
) -> dict[str, MemoryByCategory]:
    """A stage's last layer: its down projection, its gate and up projections, its second norm."""
    recomputed = (w.recomputed_layers > 0) & (w.layers_after_recomputed == 0)
    restored = np.where(
        recomputed, np.maximum(0.0, layer.saved - layer.checkpoint), layer.needed - layer.saved
    )
    gradient = w.hidden_activation_bytes / np.where(
        activation_memory.gathers_sequence(w), w.sequence_parallel, 1
    )
    incoming: MemoryByCategory = {
        "communication": _received_gradient(w),
        "temporary": np.asarray(w.has_head * gradient + _tied_head_gradient(w))
        + _prefetched_input(w),
    }
    # What a recomputed layer restored is a temporary, and is freed as such.
    freed = layer.freed_feed_forward
    phases: dict[str, MemoryByCategory] = {
        "feed_forward": {
            "activations": before,
            "logits": logits,
            "temporary": np.asarray(layer.feed_forward_backward + restored),
        },
        "column_parallel": {
            "activations": before - freed * ~recomputed,
            "logits": logits,
            "temporary": np.asarray(layer.column_parallel_backward + restored - freed * recomputed),
        },
        "norm": {
            "activations": before - layer.freed_before_norm * ~recomputed,
            "logits": logits,
            "temporary": w.zeros + layer.norm_backward,
        },
    }
    if w.fixed.framework.kernels.counts_operators:
        freed = layer.freed_before_norm + attention_memory.freed_by_attention_backward(w)
        backward = attention_memory.attention_backward_bytes(w)
        phases["attention"] = {
            "activations": before - freed * ~recomputed,
            "logits": logits,
            "temporary": np.asarray(np.maximum(0.0, restored - freed * recomputed) + backward),
        }
    return {name: add_categories(live, incoming) for name, live in phases.items()}


def _recomputed_layer_backward(
    w: Workload, layer: LayerActivations, before: Array, logits: Array
) -> MemoryByCategory:
    """The last recomputed layer, when the layers behind it have freed what they saved."""
    restored = np.maximum(0.0, layer.saved - layer.checkpoint)
    earlier = before - np.minimum(w.layers_after_recomputed, w.layers) * layer.saved
    temporary = layer.feed_forward_backward + restored
    if w.fixed.framework.kernels.counts_operators:
        freed = layer.freed_before_norm + attention_memory.freed_by_attention_backward(w)
        attention = attention_memory.attention_backward_bytes(w)
        temporary = np.maximum(temporary, restored - freed + attention)
    temporary = temporary + _prefetched_input(w)
    return {
        "activations": np.where(w.recomputed_layers > 0, earlier, 0.0),
        "logits": logits,
        "temporary": np.where(w.recomputed_layers > 0, temporary, 0.0),
        "communication": _received_gradient(w),
    }


def _prefetched_input(w: Workload) -> Number:
    """The offloaded input of a recomputed layer that comes back while another is recomputed."""
    prefetched: Number = w.fixed.offloads_checkpoints * w.residual_bytes * (w.recomputed_layers > 1)
    return prefetched


def _split_backward(w: Workload, deferred: Array, logits: Array) -> dict[str, MemoryByCategory]:
    """Phases of a split backward, whose deferred tensors grow as it proceeds: the first attention
    of the stage, the norm before it, and W.
    """
    inputs = (
        w.q_width + w.k_width + w.v_width
    ) * w.tokens * w.element_bytes + 4 * w.heads * w.tokens
    inputs = inputs + attention_memory.copied_operand_bytes(w)
    freed_later = inputs + w.residual_bytes
    return {
        "split_attention": {
            "activations": deferred + freed_later,
            "logits": logits,
            "temporary": w.zeros + w.o_width * w.tokens * w.element_bytes,
        },
        "first_norm": {
            "activations": deferred,
            "logits": logits,
            "temporary": w.zeros + activation_memory.norm_backward(w),
        },
        "weights": {
            "activations": deferred,
            "logits": logits,
            "temporary": w.zeros + activation_memory.weight_gradient_bytes(w),
        },
    }


def _sent_before_backward(w: Workload) -> Array:
    """Bytes of the last forward's output that have arrived before the next backward starts, where
    no input that came ahead has taken their place.

    A backward waits for the next rank's gradient, which that rank sends after it has received the
    output.
    """
    return np.asarray((1 - np.minimum(w.inputs_ahead, 1)) * activation_memory.boundary_bytes(w)[1])


def _tied_head_gradient(w: Workload) -> Number:
    """Bytes of the head's gradient of a weight that the embedding on the same rank shares."""
    return (
        w.vocab_rows
        * w.weight_in_dim
        * w.element_bytes
        * float(activation_memory.has_tied_head_on_rank(w))
        * activation_memory.separate_weight_gradients(w)
    )


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


def add_categories(*lives: MemoryByCategory) -> MemoryByCategory:
    """Sum of live sets, category by category."""
    result: MemoryByCategory = {}
    for live in lives:
        for category, value in live.items():
            result[category] = result[category] + value if category in result else value
    return result
