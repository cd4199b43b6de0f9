"""Activations of the microbatches that a rank has in flight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.costmodel.inputs.adapted_layers import adapted_layers
from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory import activation_memory
from workbench.costmodel.memory.live_sets.deferred_weights import deferred_weight_bytes
from workbench.costmodel.memory.loss_memory import HeadMemory
from workbench.schedules import receives_early


@dataclass(frozen=True)
class StageActivations:
    """What a microbatch leaves in the stages of a rank, bytes by pipeline rank."""

    layers: Array
    """What its layers save from forward to backward."""
    beside: Array
    """What is saved beside its layers."""
    deferred: Array
    """What its layers leave for a weight gradient (W) apart from backward."""
    losses: Number
    """1 + tokens predicted further, on the rank of the head."""


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


def activations_in_flight(w: Workload, head: HeadMemory) -> ActivationsInFlight:
    """Sum the saved activations over the microbatches in flight (1F1B: p - r of them on rank r)."""
    own = stage_activations(w)
    # Losses of all tokens that are predicted have run before any backward of theirs.
    num_losses = w.losses_in_flight * own.losses
    total = (
        w.microbatches_in_flight * (own.layers + own.beside)
        + num_losses * head.saved
        + between_stages(w)
    )
    logits = np.asarray(num_losses * head.logits)
    return ActivationsInFlight(total, logits, own.layers, own.deferred)


def stage_activations(w: Workload) -> StageActivations:
    """What a microbatch leaves in the stages of a rank."""
    frozen = w.fixed.adapter_rank > 0
    saved, deferred = (_adapted_layers(w), w.zeros) if frozen else _layers(w)
    beside, _ = activation_memory.boundary_bytes(w)
    if w.shape.mtp_layers:  # each norms its two inputs, and projects what it joins
        further = w.shape.mtp_layers * (2 + 2)
        beside = beside + w.has_head * further * w.residual_bytes
    return StageActivations(
        np.asarray(saved), beside, np.asarray(deferred), w.has_head * (1 + w.shape.mtp_layers)
    )


def _layers(w: Workload) -> tuple[Number, Number]:
    """(bytes that the layers of a rank save of a microbatch, those that they leave for W)."""
    is_moe = w.shape.moe is not None
    dense, moe = (activation_memory.layer_activations(w, each, False) for each in (False, is_moe))
    share = np.divide(w.dense_layers, np.maximum(w.layers, 1))
    layer_saved = share * dense.saved + (1 - share) * moe.saved
    checkpoint = share * dense.checkpoint + (1 - share) * moe.checkpoint
    saved = (w.layers - w.recomputed_layers) * layer_saved + w.recomputed_layers * checkpoint
    if not w.fixed.splits_backward:
        return saved, w.zeros
    of_dense, of_moe = (deferred_weight_bytes(w, each) for each in (False, is_moe))
    return saved, w.layers * (share * of_dense + (1 - share) * of_moe)


def _adapted_layers(w: Workload) -> Number:
    """Bytes that they save beside frozen weights; those in front of the first adapter save
    nothing.
    """
    kinds = [(kind, n) for kind, n in adapted_layers(w) if kind.has_backward]
    recomputed = w.recomputed_layers / np.maximum(1, sum((n for _, n in kinds), w.zeros))
    saved: Number = w.zeros
    for kind, count in kinds:
        own = activation_memory.layer_activations(w, kind.is_moe, False, kind)
        of_layer = (1 - recomputed) * own.saved + recomputed * own.checkpoint
        saved = saved + count * of_layer
    return saved


def between_stages(w: Workload) -> Array:
    """Bytes of outputs on their way to other stages, and of inputs that came ahead."""
    _, boundary = activation_memory.boundary_bytes(w)
    outputs = boundary * (
        1
        + w.fixed.framework.model_parallel.keeps_sent_outputs
        * np.maximum(0.0, w.microbatches_in_flight - 1)
    )
    # The first that came ahead is there once an output has gone, which the last stage has none of:
    # there it comes after the backward, unless receives are posted early.
    first = 1 - w.has_head * receives_early(w.fixed.schedule, w.fixed.transport)
    inputs = float(w.pipeline > 1) * w.residual_bytes * np.maximum(0.0, w.inputs_ahead - first)
    return np.asarray(outputs + inputs)
