"""The phases of a microbatch through a stage at which memory can peak, beside what its rank keeps
then.
"""

from __future__ import annotations

from functools import reduce
from operator import add

import numpy as np

from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory import activation_memory, attention_memory
from workbench.costmodel.memory.activation_memory import LayerActivations
from workbench.costmodel.memory.live_sets.activations_in_flight import ActivationsInFlight
from workbench.costmodel.memory.live_sets.deferred_weights import deferred_weight_bytes
from workbench.costmodel.memory.loss_memory import HeadMemory
from workbench.schedules import bounded_names, receives_early

MemoryByCategory = dict[str, Array]
"""Category -> bytes by pipeline rank."""


def forward_phases(
    w: Workload, head: HeadMemory, layer: LayerActivations, flight: ActivationsInFlight
) -> dict[str, MemoryByCategory]:
    """Phases of the last forward before a backward."""
    full = {"activations": flight.total, "logits": flight.logits}
    ahead = _gradient_ahead(w)
    return {
        "forward": add_categories(full, _forward_end(w, head, layer), ahead),
        "last_gemm": add_categories(_last_gemm(w, head, layer, flight), ahead),
    }


def backward_phases(
    w: Workload,
    head: HeadMemory,
    layer: LayerActivations,
    flight: ActivationsInFlight,
    is_split: bool,
) -> dict[str, MemoryByCategory]:
    """Phases of a backward (B), or where it `is_split` of its input gradient (I) and its weight
    gradient (W).
    """
    return _head_backward(w, head, flight) | _layer_backward(w, head, layer, flight, is_split)


def _forward_end(w: Workload, head: HeadMemory, layer: LayerActivations) -> MemoryByCategory:
    """End of the last forward before a backward."""
    return {
        "logits": w.has_head * (head.forward - head.logits),
        "temporary": (1 - w.has_head) * layer.forward,
    }


def _gradient_ahead(w: Workload) -> MemoryByCategory:
    """Gradient of the backward after the last forward, posted before that forward where 1F1B
    receives early.
    """
    s = w.fixed
    early = s.schedule in bounded_names() and receives_early(s.schedule, s.transport)
    several = np.minimum(1, np.maximum(0, w.microbatches_in_flight - 1))
    return {"communication": early * several * _received_gradient(w)}


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
    w: Workload,
    head: HeadMemory,
    layer: LayerActivations,
    flight: ActivationsInFlight,
    is_split: bool,
) -> dict[str, MemoryByCategory]:
    """Backward of a stage's last layer, of a recomputed one, and of the embedding or the first
    norm.

    Full recompute restores the whole set of one layer, selective recompute what the layer did not
    save. Where backward is split, the phases of a separate W follow.
    """
    logits = flight.logits - w.has_head * head.logits
    before = flight.total - w.has_head * head.saved - _sent_before_backward(w)
    after = before - flight.microbatch + flight.deferred * is_split
    phases = _last_layer_backward(w, layer, before, logits) | {
        "recomputed_layer": _recomputed_layer_backward(w, layer, before, logits, is_split),
        "embedding": {
            "activations": after,
            "logits": logits,
            "temporary": w.has_embedding * activation_memory.embedding_backward(w)
            + (1 - w.has_embedding) * activation_memory.norm_backward(w),
            "communication": _received_gradient(w) * _holds_gradient(w, is_split),
        },
    }
    return phases | (_split_backward(w, after, logits) if is_split else {})


def _holds_gradient(w: Workload, is_split: bool) -> bool:
    """Whether what a stage received is there until its backward returns: in this engine, where a
    rank has one stage whose backward is not split.
    """
    s = w.fixed
    return s.framework.kernels.counts_operators and s.chunks == 1 and not is_split


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
            "temporary": np.asarray(np.maximum(0.0, restored - freed * recomputed) + backward)
            + (1 - w.has_head) * gradient,
        }
    if w.shape.norms_outputs:
        phases["output_norm"] = {
            "activations": before,
            "logits": logits,
            "temporary": np.asarray(restored + layer.output_norm_backward),
        }
    return {name: add_categories(live, incoming) for name, live in phases.items()}


def _recomputed_layer_backward(
    w: Workload, layer: LayerActivations, before: Array, logits: Array, is_split: bool
) -> MemoryByCategory:
    """The last recomputed layer, when the layers behind it have freed what they saved. Where
    backward is split these leave more for W than they saved: then the first recomputed layer.
    """
    restored = np.maximum(0.0, layer.saved - layer.checkpoint)
    behind = np.minimum(w.layers_after_recomputed, w.layers)
    earlier = before - behind * layer.saved
    incoming = _received_gradient(w)
    if is_split:
        others = np.maximum(0, np.minimum(w.recomputed_layers, w.layers) - 1)
        left = deferred_weight_bytes(w, is_moe=w.shape.moe is not None)
        earlier = earlier + behind * left + others * (left - layer.checkpoint)
        incoming = incoming + w.has_head * w.residual_bytes
    temporary = layer.feed_forward_backward + restored
    if w.fixed.framework.kernels.counts_operators and not is_split:
        freed = layer.freed_before_norm + attention_memory.freed_by_attention_backward(w)
        attention = attention_memory.attention_backward_bytes(w)
        temporary = np.maximum(temporary, restored - freed + attention)
    temporary = np.maximum(temporary, restored + layer.output_norm_backward)
    temporary = temporary + _prefetched_input(w)
    return {
        "activations": np.where(w.recomputed_layers > 0, earlier, 0.0),
        "logits": logits,
        "temporary": np.where(w.recomputed_layers > 0, temporary, 0.0),
        "communication": incoming,
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
            "temporary": w.zeros + w.attended_width * w.tokens * w.element_bytes,
        },
        "first_norm": {
            "activations": deferred,
            "logits": logits,
            "temporary": w.zeros + activation_memory.norm_backward(w),
        },
        "weights": weight_gradient_phase(w, deferred, logits),
    }


def weight_gradient_phase(w: Workload, kept: Array, logits: Array) -> MemoryByCategory:
    """A weight gradient (W) apart from backward, beside what the rank keeps."""
    return {
        "activations": kept,
        "logits": logits,
        "temporary": w.zeros + activation_memory.weight_gradient_bytes(w),
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


def add_categories(*lives: MemoryByCategory) -> MemoryByCategory:
    """Sum of live sets, category by category."""
    result: MemoryByCategory = {}
    for live in lives:
        for category, value in live.items():
            result[category] = result[category] + value if category in result else value
    return result


def total_bytes(live: MemoryByCategory) -> Array:
    """Sum over categories, by pipeline rank; a zero before the first would be one more pass."""
    return np.asarray(reduce(add, live.values())) if live else np.zeros(())
