"""Live sets: phases of a step at which memory can peak, and what is live then besides model
states.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.rank_parameters import ParamCounts
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory import activation_memory
from workbench.costmodel.memory.activation_memory import LayerActivations
from workbench.costmodel.memory.loss_memory import HeadMemory
from workbench.costmodel.memory.loss_memory import head_memory as head_of

OPTIMIZER_CAST_BYTES, CPU_FUSED_CAST_BYTES = 64 * 2**20, 2**20
"""Bytes of a piece in which the optimizer upcasts 16-bit gradients; the second one of its fused
kernel on a CPU.
"""

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
    if not w.fixed.framework.gradients_freed_after_step:
        return 1.0
    return np.where(w.microbatches > 1, 1.0, 0.0)


def live_by_phase(w: Workload) -> dict[str, MemoryByCategory]:
    """Activations, logits and temporaries live at each phase of forward and backward that can be
    the peak.

    Returns:
        Phase -> category -> bytes by pipeline rank; `first_forward` is the state after the first
        microbatch's forward.
    """
    head, layer = (
        head_of(w),
        activation_memory.layer_activations(w, is_moe=w.shape.moe is not None),
    )
    flight = _activations_in_flight(w, head)
    full = {"activations": flight.total, "logits": flight.logits}
    return {
        "first_forward": {name: size / w.microbatches_in_flight for name, size in full.items()},
        "forward": add_categories(full, _forward_end(w, head, layer), _unreleased_send(w)),
        "product": add_categories(_last_gemm(w, head, layer, flight), _unreleased_send(w)),
        **_head_backward(w, head, flight),
        **_layer_backward(w, head, layer, flight),
    }


def _activations_in_flight(w: Workload, head: HeadMemory) -> ActivationsInFlight:
    """Sum the saved activations over the microbatches in flight (1F1B: p - r of them on rank r)."""
    dense, moe = (
        activation_memory.layer_activations(w),
        activation_memory.layer_activations(w, is_moe=w.shape.moe is not None),
    )
    share = np.divide(w.dense_layers, w.layers)
    kept_whole = share * dense.saved + (1 - share) * moe.saved
    saved = (w.layers - w.recomputed_layers) * kept_whole + w.recomputed_layers * dense.checkpoint
    kept, boundary = activation_memory.boundary_bytes(w)
    ahead = 1 + w.fixed.framework.host_run_ahead * (w.sequence_parallel > 1)
    one = (saved + kept) * ahead
    aside = w.layers * activation_memory.deferred_weight_bytes(w) * float(w.fixed.splits_backward)
    late = w.deferred_microbatches * (aside - saved) * float(w.fixed.splits_backward)
    loss = w.losses_in_flight * w.has_head
    outputs = boundary * (
        1 + w.fixed.framework.keeps_sent_outputs * np.maximum(0.0, w.microbatches_in_flight - 1)
    )
    held = w.microbatches_in_flight * one + loss * head.saved * ahead + outputs + late
    return ActivationsInFlight(
        held, loss * head.logits, saved / w.fixed.chunks, aside / w.fixed.chunks
    )


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
    lives: dict[str, MemoryByCategory] = {
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
    return {name: add_categories(live, _unreleased_send(w)) for name, live in lives.items()}


def _layer_backward(
    w: Workload, head: HeadMemory, layer: LayerActivations, flight: ActivationsInFlight
) -> dict[str, MemoryByCategory]:
    """Backward of a stage's last layer, of a recomputed one, and of the embedding or the first
    norm.

    Full recompute restores the whole set of one layer, selective recompute what the layer did not
    save. Where the schedule splits backward, the phases of a separate W follow.
    """
    logits = flight.logits - w.has_head * head.logits
    before = flight.total - w.has_head * head.saved
    again = layer.needed - layer.saved
    remade = np.maximum(0.0, layer.saved - layer.checkpoint)
    last_again = (w.recomputed_layers > 0) & (w.layers_after_recomputed == 0)
    again = np.where(last_again, remade, again)
    arriving = w.hidden_activation_bytes / np.where(
        activation_memory.gathers_sequence(w), w.sequence_parallel, 1
    )
    incoming: MemoryByCategory = {
        "communication": np.asarray(
            (1 - w.has_head) * w.hidden_activation_bytes / w.sequence_parallel
        ),
        "temporary": np.asarray(w.has_head * arriving + _tied_head_gradient(w)),
    }
    released = layer.freed_before_norm * ~last_again
    earlier = before - np.minimum(w.layers_after_recomputed, w.layers) * layer.saved
    return {
        "layer": add_categories(
            {
                "activations": before,
                "logits": logits,
                "temporary": np.asarray(layer.feed_forward_backward + again),
            },
            incoming,
        ),
        "columns": add_categories(
            {
                "activations": before - layer.freed_feed_forward * ~last_again,
                "logits": logits,
                "temporary": np.asarray(
                    layer.column_parallel_backward + again - layer.freed_feed_forward * last_again
                ),
            },
            incoming,
        ),
        "norm": add_categories(
            {
                "activations": before - released,
                "logits": logits,
                "temporary": w.zeros + layer.norm_backward,
            },
            incoming,
        ),
        "remade": add_categories(
            {
                "activations": np.where(w.recomputed_layers > 0, earlier, 0.0),
                "logits": logits,
                "temporary": np.where(
                    w.recomputed_layers > 0, layer.feed_forward_backward + remade, 0.0
                ),
            },
            {"communication": incoming["communication"]},
        ),
        "embedding": {
            "activations": before - flight.microbatch + flight.deferred,
            "logits": logits,
            "temporary": w.has_embedding * activation_memory.embedding_backward(w)
            + (1 - w.has_embedding) * activation_memory.norm_backward(w),
        },
    } | (
        _split_backward(w, before - flight.microbatch + flight.deferred, logits)
        if w.fixed.splits_backward
        else {}
    )


def _split_backward(w: Workload, aside: Array, logits: Array) -> dict[str, MemoryByCategory]:
    """Phases of a split backward, whose deferred tensors grow as it proceeds: the first attention
    of the stage, the norm before it, and W.
    """
    met = (w.q_width + w.k_width + w.v_width) * w.tokens * w.element_bytes + 4 * w.heads * w.tokens
    met = met + activation_memory.repeated_kv_bytes(w)
    kept = met + w.hidden_activation_bytes / w.sequence_parallel
    return {
        "attention": {
            "activations": aside + kept,
            "logits": logits,
            "temporary": w.zeros + w.o_width * w.tokens * w.element_bytes,
        },
        "first_norm": {
            "activations": aside,
            "logits": logits,
            "temporary": w.zeros + activation_memory.norm_backward(w),
        },
        "weights": {
            "activations": aside,
            "logits": logits,
            "temporary": w.zeros + activation_memory.weight_gradient_bytes(w),
        },
    }


def _tied_head_gradient(w: Workload) -> Number:
    """Bytes of the head's gradient of a weight that the embedding on the same rank shares."""
    return (
        w.vocab_rows
        * w.weight_in_dim
        * w.element_bytes
        * float(activation_memory.has_tied_head_on_rank(w))
    )


def _unreleased_send(w: Workload) -> MemoryByCategory:
    """Output that the last stage of an early-backward schedule holds: it sends nothing between two
    backwards, so the send buffer is not released.
    """
    holds = (
        w.has_head * (1 - w.has_embedding) * (w.microbatches > 1) * (w.fixed.schedule != "gpipe")
    )
    return {"communication": np.asarray(holds * w.hidden_activation_bytes / w.sequence_parallel)}


def step_buffers(w: Workload, p: ParamCounts) -> MemoryByCategory:
    """Buffers live throughout forward and backward: all-gathered parameters and sequences, reduce
    buckets.
    """
    kept, live = w.fixed.framework, zero_working_set(w, p)
    sequences = _num_gathered_buffers(w) * w.hidden_activation_bytes * (w.sequence_parallel > 1)
    tables = (
        kept.table_bytes * w.vocab_rows * w.weight_in_dim * np.maximum(w.has_embedding, w.has_head)
    )
    buckets = kept.bucket_mib * 2**20 * (w.fixed.precision == "fp16" and w.zero >= 1)
    if not (kept.gathered_buffers or kept.table_bytes or buckets):
        return live
    return add_categories(live, {"communication": w.zeros + sequences + tables + buckets})


def _num_gathered_buffers(w: Workload) -> Number:
    """All-gathered sequences that another stream still holds: as many as the host runs ahead.

    Under a pipeline the host waits for its neighbors; where a tensor group spans more than two
    nodes, always.
    """
    kept = w.fixed.framework
    if w.pipeline == 1:
        return kept.gathered_buffers
    each = kept.gathered_ahead * (w.tensor <= 2 * w.fixed.gpus_per_node)
    return np.minimum(kept.gathered_buffers, each * np.maximum(w.microbatches_in_flight - 2, 0.0))


def zero_working_set(w: Workload, p: ParamCounts) -> MemoryByCategory:
    """ZeRO-3's working set: all-gathered units and the gradient of one unit before its
    reduce-scatter.

    Two units are all-gathered at once (one in use, one prefetched), or all where they stay
    unsharded between forward and backward. ZeRO-2 has one reduce bucket.
    """
    if w.zero < 2:
        return {}
    if w.zero == 2:
        return {
            "communication": np.minimum(
                w.searched.bucket_bytes, p.trained * w.gradient_element_bytes
            )
            * w.reduce_microbatch
        }
    unit = np.maximum(
        p.layer, np.maximum(w.has_embedding, w.has_head) * (w.vocab_rows * w.weight_in_dim)
    )
    if w.fixed.stack == "workbench":  # positions and norms come with the tables
        ends = p.total - w.layers * p.layer
        apart = 1 + w.has_embedding * w.has_head * (
            1 - float(activation_memory.has_tied_head_on_rank(w))
        )
        unit = np.maximum(unit, np.maximum(w.has_embedding, w.has_head) * ends / apart)
    if w.fixed.framework.root_gathered:
        unit = (
            w.vocab_rows
            * w.weight_in_dim
            * (
                w.has_embedding
                + w.has_head * (1 - float(activation_memory.has_tied_head_on_rank(w)))
            )
            + p.layer
        )
    most = w.fixed.framework.gathered_parameters
    kept = np.maximum(w.searched.keep_gathered, w.pipeline > 1)
    window = unit + (w.fixed.num_zero_in_flight - 1) * p.layer
    units = np.where(kept > 0, p.total, np.minimum(p.total, np.minimum(window, most)))
    unit = np.minimum(unit, most)
    made = (
        unit
        * w.gradient_element_bytes
        * w.reduce_microbatch
        * activation_memory.has_weight_gradients(w)
    )
    return {"gathered": units * w.element_bytes, "communication": w.zeros + made}


def optimizer_step_buffers(w: Workload, p: ParamCounts) -> MemoryByCategory:
    """Temporaries of the optimizer step: upcast gradients and moments, in pieces in this engine,
    and the gradient of a tied weight that the first and last stage exchange.
    """
    table = w.vocab_rows * w.weight_in_dim * activation_memory.has_weight_gradients(w)
    owned = p.trained / (w.searched.shard if w.zero >= 1 else 1)
    if w.fixed.stack == "workbench":
        element = w.fixed.step_element_bytes
        each = element * (w.gradient_element_bytes != element) + w.fixed.step_cast_bytes
    else:
        each = (
            4.0 * (w.gradient_element_bytes < 4) * (w.fixed.master_bytes > 0)
        )  # what is stepped in 16 bits stays so
    most = np.maximum(OPTIMIZER_CAST_BYTES, table * each)
    if (
        w.uses_fused_kernels and w.fixed.kernels == "fused"
    ):  # a card's kernel casts as it goes, a processor's tensors are cut
        most = CPU_FUSED_CAST_BYTES * float(w.fixed.gpu.device == "cpu")
    pieces = np.minimum(owned * each, most * (each > 0))
    if w.fixed.framework.optimizer_temporary:
        pieces = owned * w.fixed.framework.optimizer_temporary
    tied = float(w.shape.tied and w.pipeline > 1) * np.maximum(w.has_embedding, w.has_head)
    end = table / (w.searched.shard if w.zero >= 1 else 1)
    return {"temporary": np.maximum(pieces, tied * end * w.gradient_element_bytes)}


def add_categories(*lives: MemoryByCategory) -> MemoryByCategory:
    """Sum of live sets, category by category."""
    result: MemoryByCategory = {}
    for live in lives:
        for category, value in live.items():
            result[category] = result[category] + value if category in result else value
    return result
