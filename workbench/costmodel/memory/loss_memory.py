"""Activation memory of the final norm, the head and the cross-entropy loss.

Logits `[tokens, vocabulary]` in fp32 are often the largest tensor of a step; fused and chunked
losses exist to avoid them.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import numpy as np

from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.activation_memory import (
    accumulated_gradient_bytes,
    gathers_sequence,
    grid_block_bytes,
    has_weight_gradients,
    head_gradients,
    input_gradient_in_flight,
    keeps_small_seams_eager,
    norm_backward,
    weight_gradient_peak,
)
from workbench.costmodel.memory.norm_memory import norm_saved
from workbench.runtime_facts.fused_thresholds import MIN_FUSED_LOSS_NUMEL
from workbench.runtime_facts.loss_chunks import loss_chunk_columns, loss_chunk_tokens


@dataclass(frozen=True)
class HeadMemory:
    """Bytes of the final norm, the head and the loss for one microbatch."""

    saved: Number
    """Activations saved from forward to backward."""
    logits: Number
    """Tensors of vocabulary width saved from forward to backward."""
    forward: Number
    """Tensors of vocabulary width at the peak of the loss's forward."""
    loss: Number
    """Temporaries during the loss's backward, besides what is saved."""
    projection: Number
    """Temporaries during the output projection's backward; the saved logits are freed by then."""
    norm: Number
    """Temporaries during the final norm's backward; what the head saved is freed by then."""


def head_memory(w: Workload) -> HeadMemory:
    """Activation memory of the final norm, the head and the loss that the plan's kernels run.

    Capped logits save their derivative, but where the loss is computed in chunks of tokens, which
    need it until the chunk's gradient.
    """
    head = _uncapped(w)
    if w.shape.logit_softcap is None or _framework_logit_bytes(w) is not None:
        return head
    chunked = w.fuses_head
    derivative = w.element_bytes * w.vocab_rows * w.tokens
    chunk = loss_chunk_tokens(w.tokens, w.hidden_per_rank, w.vocab_rows) * w.vocab_rows
    saved = np.where(chunked, 0.0, derivative)
    return replace(
        head,
        logits=head.logits + saved,
        forward=head.forward + np.where(chunked, chunk * w.element_bytes, derivative),
    )


def _uncapped(w: Workload) -> HeadMemory:
    if not np.any(w.uses_fused_kernels | w.fuses_head):
        return _eager_loss(w)
    fused, split = _fused_loss(w), w.tensor > 1
    stays_eager = (
        split & (w.vocab_rows * w.tokens < MIN_FUSED_LOSS_NUMEL) & keeps_small_seams_eager(w)
    )
    if not np.any(stays_eager):
        return fused
    return HeadMemory(
        *(
            np.where(stays_eager, eager_bytes, fused_bytes)
            for eager_bytes, fused_bytes in zip(astuple(_eager_loss(w)), astuple(fused))
        )
    )


def _eager_loss(w: Workload) -> HeadMemory:
    """The loss in eager operators: fp32 logits, and the framework's own count where its profile
    has one.
    """
    logits = w.vocab_rows * w.tokens
    logits_16bit = w.element_bytes * logits
    table = w.table_params
    split = np.asarray(w.tensor > 1, dtype=float)
    cast = logits_16bit if w.element_bytes < w.upcast_bytes else 0.0
    framework_bytes = _framework_logit_bytes(w)
    if framework_bytes is not None:
        split, cast, extra = np.ones_like(split), 0.0, (framework_bytes - w.upcast_bytes) * logits
        logits_16bit = np.minimum(framework_bytes, w.element_bytes) * logits
    else:
        extra = 0.0
    gradient, blocks = _projection(w, table, logits_16bit)
    gathered = w.hidden_activation_bytes * gathers_sequence(w)
    return HeadMemory(
        saved=norm_saved(w) - _unread_input(w) + split * 10 * w.tokens,
        logits=w.upcast_bytes * logits,
        forward=np.maximum(
            split * (w.upcast_bytes * logits + cast)
            + (1 - split) * (2 * w.upcast_bytes * logits)
            + extra,
            logits_16bit + blocks,
        )
        + _unread_input(w),
        loss=split * cast + (1 - split) * (2 * w.upcast_bytes * logits) + extra,
        projection=_projection_backward(w, gathered, logits_16bit + blocks, gradient),
        norm=norm_backward(w),
    )


def _framework_logit_bytes(w: Workload) -> Number | None:
    """Bytes per logit at the peak of the framework's own loss; None: of torch's eager operators."""
    loss, kernels = w.fixed.framework.loss, w.fixed.kernels
    whole, share = (loss.peak_logit_bytes(kernels, split) for split in (False, True))
    if whole is None or share is None:
        return None
    return np.where(np.asarray(w.tensor) > 1, share, whole)


def _fused_loss(w: Workload) -> HeadMemory:
    """The loss of fused and compiled kernels.

    Over a vocabulary-parallel head it works in place of the logits; otherwise it processes the
    tokens in chunks, and saves the gradients of the hidden activation and of the weight until
    backward.
    """
    table, tokens = w.table_params, w.tokens
    split = 1.0 - np.asarray(w.fuses_head, dtype=float)
    logits = w.element_bytes * w.vocab_rows * tokens
    gradient, blocks = _projection(w, table, logits)
    gathered = w.hidden_activation_bytes * gathers_sequence(w)
    fp16 = w.fixed.precision == "fp16"  # computed before loss scaling, so kept in fp32
    gradients = (tokens * w.hidden_per_rank + table * has_weight_gradients(w)) * (
        w.upcast_bytes if fp16 else w.element_bytes
    )
    chunk_logits = (
        loss_chunk_tokens(tokens, w.hidden_per_rank, w.vocab_rows)
        * loss_chunk_columns(w.vocab_rows)
        * w.element_bytes
    )
    return HeadMemory(
        saved=norm_saved(w)
        - (1 - split) * w.hidden_activation_bytes
        - split * _unread_input(w)
        + split * w.upcast_bytes * tokens,
        logits=split * logits + (1 - split) * gradients,
        forward=split * (logits + blocks + _unread_input(w))
        + (1 - split) * (gradients + chunk_logits + w.hidden_activation_bytes),
        loss=(1 - split) * fp16 * gradients * w.element_bytes / w.upcast_bytes,
        projection=_projection_backward(w, gathered, split * (logits + blocks), split * gradient),
        norm=norm_backward(w),
    )


def _unread_input(w: Workload) -> Number:
    """Bytes of the head's input, which only the gradient of a weight that is not frozen reads: it
    is there until the forward returns.
    """
    return w.residual_bytes * (1 - has_weight_gradients(w))


def _projection_backward(w: Workload, gathered: Number, logits: Number, gradient: Number) -> Number:
    """Temporaries during the output projection's backward; of a frozen one its input's gradient
    alone, beside that of the logits or its own shard.

    Args:
        w: Per-rank problem sizes.
        gathered: Bytes of the all-gathered input.
        logits: Bytes of the gradient of the logits.
        gradient: Bytes of the weight's.
    """
    if not has_weight_gradients(w):
        shard = w.residual_bytes * gathers_sequence(w)
        return w.hidden_activation_bytes + np.maximum(logits, shard)
    operands, table = gathered + logits, accumulated_gradient_bytes(w, w.table_params)
    return input_gradient_in_flight(w) + weight_gradient_peak(w, operands, gradient, table)


def _projection(w: Workload, table: Number, logits: Number) -> tuple[Number, Number]:
    """(bytes of the head's weight gradient, bytes of other ranks' blocks on a tensor grid); 3-D
    reduce-scatters the gradient when everything else is freed.
    """
    algorithm = w.fixed.algorithm
    blocks = (
        grid_block_bytes(w, w.hidden_activation_bytes, table, logits) if algorithm != "1d" else 0.0
    )
    return table * w.element_bytes * head_gradients(w) * (algorithm != "3d"), blocks
