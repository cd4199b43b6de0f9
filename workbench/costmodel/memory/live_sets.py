"""The instants of a step at which memory can be largest, and what lives then beside the persistent
states.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory import activation_memory
from workbench.costmodel.memory.activation_memory import Layer
from workbench.costmodel.memory.loss_memory import Head
from workbench.costmodel.memory.loss_memory import head as head_of
from workbench.costmodel.memory.model_states import Held

CAST_BYTES, CACHED_BYTES = 64 * 2**20, 2**20
"""The optimizer widens 16-bit gradients in pieces of this size; the second one's where it is fused,
on a processor.
"""

Live = dict[str, Array]
"""Category -> bytes by pipeline rank."""


@dataclass(frozen=True)
class Flight:
    """Activations at their fullest: all microbatches in flight. Bytes by pipeline rank."""

    all: Array
    logits: Array
    one: Array
    """Of one microbatch's layers of a stage."""
    aside: Array
    """What those leave for their weights' gradients."""


LATE = ("embedding", "optimizer")
"""Instants at which all gradients exist, whatever the stack."""


def early_gradients(w: Workload) -> Number:
    """1 where gradients exist from the step's start, 0 where its only backward makes them anew."""
    if not w.setting.software.late_gradients:
        return 1.0
    return np.where(w.microbatches > 1, 1.0, 0.0)


def passes(w: Workload) -> dict[str, Live]:
    """What forward and backward add at each instant that can be the largest, and after the first
    forward.
    """
    head, layer = head_of(w), activation_memory.layer(w, mixture=w.shape.moe is not None)
    flight = _flight(w, head)
    full = {"activations": flight.all, "logits": flight.logits}
    return {
        "first_forward": {name: size / w.in_flight for name, size in full.items()},
        "forward": plus(full, _forward(w, head, layer), _sent(w)),
        "product": plus(_product(w, head, layer, flight), _sent(w)),
        **_head_backward(w, head, flight),
        **_layer_backward(w, head, layer, flight),
    }


def _flight(w: Workload, head: Head) -> Flight:
    dense, mixture = (
        activation_memory.layer(w),
        activation_memory.layer(w, mixture=w.shape.moe is not None),
    )
    share = np.divide(w.dense_layers, w.layers)
    kept_whole = share * dense.saved + (1 - share) * mixture.saved
    saved = (w.layers - w.recomputed) * kept_whole + w.recomputed * dense.checkpoint
    kept, boundary = activation_memory.ends(w)
    ahead = 1 + w.setting.software.ahead * (w.sequence_parallel > 1)
    one = (saved + kept) * ahead
    aside = w.layers * activation_memory.aside(w) * float(w.setting.split)
    late = w.put_aside * (aside - saved) * float(w.setting.split)
    loss = w.head_in_flight * w.last
    outputs = boundary * (1 + w.setting.software.keeps_outputs * np.maximum(0.0, w.in_flight - 1))
    held = w.in_flight * one + loss * head.saved * ahead + outputs + late
    return Flight(held, loss * head.logits, saved / w.setting.chunks, aside / w.setting.chunks)


def _forward(w: Workload, head: Head, layer: Layer) -> Live:
    """The end of the last forward before a backward."""
    return {
        "logits": w.last * (head.forward - head.logits),
        "temporary": (1 - w.last) * layer.forward,
    }


def _product(w: Workload, head: Head, layer: Layer, flight: Flight) -> Live:
    """The last layer's last product forward; neither the stage's output nor anything of the head is
    there yet.
    """
    _, boundary = activation_memory.ends(w)
    return {
        "activations": flight.all - w.last * head.saved - boundary,
        "logits": flight.logits - w.last * head.logits,
        "temporary": w.nothing + layer.product,
    }


def _head_backward(w: Workload, head: Head, flight: Flight) -> dict[str, Live]:
    """The loss, the projection (the kept logits are gone) and the final norm (what the head kept is
    gone).
    """
    logits = flight.logits - w.last * head.logits
    before = flight.all - w.last * head.saved
    lives: dict[str, Live] = {
        "loss": {
            "activations": flight.all,
            "logits": flight.logits,
            "temporary": w.last * head.loss,
        },
        "projection": {
            "activations": flight.all,
            "logits": logits,
            "temporary": w.last * head.projection,
        },
        "final_norm": {
            "activations": before,
            "logits": logits,
            "temporary": w.last * head.norm + _waiting(w),
        },
    }
    return {name: plus(live, _sent(w)) for name, live in lives.items()}


def _layer_backward(w: Workload, head: Head, layer: Layer, flight: Flight) -> dict[str, Live]:
    """A stage's last layer (feed-forward, its first products, its norm) with the incoming gradient,
    at last the embedding or the first norm; and, where backward is split, the weights' half of it.

    Recomputing brings the whole set of one layer back.
    """
    logits = flight.logits - w.last * head.logits
    before = flight.all - w.last * head.saved
    again = layer.whole - layer.saved
    remade = np.maximum(0.0, layer.saved - layer.checkpoint)
    last_again = (w.recomputed > 0) & (w.kept_after == 0)
    again = np.where(last_again, remade, again)
    arriving = w.stream / np.where(activation_memory.gathers(w), w.sequence_parallel, 1)
    incoming: Live = {
        "communication": np.asarray((1 - w.last) * w.stream / w.sequence_parallel),
        "temporary": np.asarray(w.last * arriving + _waiting(w)),
    }
    released = layer.released * ~last_again
    earlier = before - np.minimum(w.kept_after, w.layers) * layer.saved
    return {
        "layer": plus(
            {
                "activations": before,
                "logits": logits,
                "temporary": np.asarray(layer.transient + again),
            },
            incoming,
        ),
        "columns": plus(
            {
                "activations": before - layer.fed * ~last_again,
                "logits": logits,
                "temporary": np.asarray(layer.columns + again - layer.fed * last_again),
            },
            incoming,
        ),
        "norm": plus(
            {
                "activations": before - released,
                "logits": logits,
                "temporary": w.nothing + layer.norm,
            },
            incoming,
        ),
        "remade": plus(
            {
                "activations": np.where(w.recomputed > 0, earlier, 0.0),
                "logits": logits,
                "temporary": np.where(w.recomputed > 0, layer.transient + remade, 0.0),
            },
            {"communication": incoming["communication"]},
        ),
        "embedding": {
            "activations": before - flight.one + flight.aside,
            "logits": logits,
            "temporary": w.first * activation_memory.embedding(w)
            + (1 - w.first) * activation_memory.norm_backward(w),
        },
    } | (_split_backward(w, before - flight.one + flight.aside, logits) if w.setting.split else {})


def _split_backward(w: Workload, aside: Array, logits: Array) -> dict[str, Live]:
    """Where a backward leaves weights for later, what it leaves grows as it goes: the stage's first
    attention, whose inputs are there beside their gradients; the norm before it; and the weights'
    half.
    """
    met = (w.q_width + w.k_width + w.v_width) * w.tokens * w.element + 4 * w.heads * w.tokens
    met = met + activation_memory.repeated_heads(w)
    kept = met + w.stream / w.sequence_parallel
    return {
        "attention": {
            "activations": aside + kept,
            "logits": logits,
            "temporary": w.nothing + w.o_width * w.tokens * w.element,
        },
        "first_norm": {
            "activations": aside,
            "logits": logits,
            "temporary": w.nothing + activation_memory.norm_backward(w),
        },
        "weights": {
            "activations": aside,
            "logits": logits,
            "temporary": w.nothing + activation_memory.weights(w),
        },
    }


def _waiting(w: Workload) -> Number:
    """The head's gradient of a weight that the embedding on the same rank shares."""
    return w.vocab * w.height * w.element * float(activation_memory.shared_here(w))


def _sent(w: Workload) -> Live:
    """The last stage of an early-backward schedule transfers nothing between two backwards: it
    holds what it sent.
    """
    holds = w.last * (1 - w.first) * (w.microbatches > 1) * (w.setting.schedule != "gpipe")
    return {"communication": np.asarray(holds * w.stream / w.sequence_parallel)}


def working(w: Workload, p: Held) -> Live:
    """What a stack has in its hands all through forward and backward: gathered parameters,
    sequences, buckets.
    """
    kept, live = w.setting.software, gathered(w, p)
    sequences = _waiting_gathers(w) * w.stream * (w.sequence_parallel > 1)
    tables = kept.table_bytes * w.vocab * w.height * np.maximum(w.first, w.last)
    buckets = kept.bucket_mib * 2**20 * (w.setting.precision == "fp16" and w.zero >= 1)
    if not (kept.gathered_buffers or kept.table_bytes or buckets):
        return live
    return plus(live, {"communication": w.nothing + sequences + tables + buckets})


def _waiting_gathers(w: Workload) -> Number:
    """Gathered sequences whose blocks another stream still holds: as many as the host runs ahead.

    Under a pipeline it waits for its neighbours; where a tensor group spans more than two nodes,
    always.
    """
    kept = w.setting.software
    if w.pipeline == 1:
        return kept.gathered_buffers
    each = kept.gathered_ahead * (w.tensor <= 2 * w.setting.node)
    return np.minimum(kept.gathered_buffers, each * np.maximum(w.in_flight - 2, 0.0))


def gathered(w: Workload, p: Held) -> Live:
    """ZeRO-3's working set: two units, or all where they stay gathered; and the gradient of a unit
    not yet sharded.
    """
    if w.zero < 2:
        return {}
    if w.zero == 2:
        return {
            "communication": np.minimum(w.knobs.bucket_bytes, p.trained * w.gradient_element)
            * w.reduce_microbatch
        }
    unit = np.maximum(p.layer, np.maximum(w.first, w.last) * (w.vocab * w.height))
    if w.setting.stack == "workbench":  # positions and norms come with the tables
        ends = p.total - w.layers * p.layer
        apart = 1 + w.first * w.last * (1 - float(activation_memory.shared_here(w)))
        unit = np.maximum(unit, np.maximum(w.first, w.last) * ends / apart)
    if w.setting.software.root_gathered:
        unit = (
            w.vocab * w.height * (w.first + w.last * (1 - float(activation_memory.shared_here(w))))
            + p.layer
        )
    most = w.setting.software.gathered_parameters
    kept = np.maximum(w.knobs.keep_gathered, w.pipeline > 1)
    window = unit + (w.setting.in_flight - 1) * p.layer
    units = np.where(kept > 0, p.total, np.minimum(p.total, np.minimum(window, most)))
    unit = np.minimum(unit, most)
    made = unit * w.gradient_element * w.reduce_microbatch * activation_memory.trained(w)
    return {"gathered": units * w.element, "communication": w.nothing + made}


def optimizer(w: Workload, p: Held) -> Live:
    """What the step makes of gradients and moments, ours widened in pieces; and the other end's
    gradient of a weight that the first and last stage share.
    """
    table = w.vocab * w.height * activation_memory.trained(w)
    owned = p.trained / (w.knobs.shard if w.zero >= 1 else 1)
    if w.setting.stack == "workbench":
        element = w.setting.step_element
        each = element * (w.gradient_element != element) + w.setting.step_cast
    else:
        each = (
            4.0 * (w.gradient_element < 4) * (w.setting.master_bytes > 0)
        )  # what is stepped in 16 bits stays so
    most = np.maximum(CAST_BYTES, table * each)
    if (
        w.fused and w.setting.kernels == "fused"
    ):  # a card's kernel casts as it goes, a processor's tensors are cut
        most = CACHED_BYTES * float(w.setting.card.device == "cpu")
    pieces = np.minimum(owned * each, most * (each > 0))
    if w.setting.software.stepped:
        pieces = owned * w.setting.software.stepped
    tied = float(w.shape.tied and w.pipeline > 1) * np.maximum(w.first, w.last)
    end = table / (w.knobs.shard if w.zero >= 1 else 1)
    return {"temporary": np.maximum(pieces, tied * end * w.gradient_element)}


def plus(*lives: Live) -> Live:
    """The sum of live sets, category by category."""
    result: Live = {}
    for live in lives:
        for category, value in live.items():
            result[category] = result[category] + value if category in result else value
    return result
