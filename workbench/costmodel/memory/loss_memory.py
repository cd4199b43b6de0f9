"""Memory of the final norm, the head and the loss, by what makes the loss."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.activation_memory import (
    accumulated_gradient_bytes,
    gathers_sequence,
    grid_block_bytes,
    has_weight_gradients,
    input_gradient_in_flight,
    keeps_small_seams_eager,
    norm_backward,
    norm_saved,
    weight_gradient_peak,
)

LOSS_MIN_CHUNK_TOKENS, LOSS_MAX_CHUNKS, LOSS_CHUNK_ALIGNMENT = 1024, 8, 64
"""Of the chunked loss (`workbench.kernels.linear_cross_entropy`): a run's least tokens, the most
runs, and what a run's tokens and its room for logits are multiples of.
"""

MIN_FUSED_LOSS_NUMEL = 2**22
"""Logits of a split vocabulary below which a processor's fused loss stays plain
(`kernels/fused_seams.py`).
"""


@dataclass(frozen=True)
class HeadMemory:
    """Bytes of the final norm, the head and the loss, for one microbatch."""

    saved: Number
    """Activations kept from forward to backward."""
    logits: Number
    """Of vocabulary width, kept from forward to backward."""
    forward: Number
    """Of vocabulary width, at the loss's own peak forward."""
    loss: Number
    """Temporaries while the loss runs backward, beside what is kept."""
    projection: Number
    """Temporaries while the projection runs backward; the kept logits are gone by then."""
    norm: Number
    """Temporaries while the final norm runs backward; what the head kept is gone by then."""


def head_memory(w: Workload) -> HeadMemory:
    """The final norm and the loss; over a split vocabulary the loss is our own and works in
    place.
    """
    if not w.uses_fused_kernels:
        return _eager_loss(w)
    own, split = _fused_loss(w), w.tensor > 1
    few = split & (w.vocab_rows * w.tokens < MIN_FUSED_LOSS_NUMEL) & keeps_small_seams_eager(w)
    if not np.any(few):
        return own
    return HeadMemory(
        *(np.where(few, plain, mine) for plain, mine in zip(astuple(_eager_loss(w)), astuple(own)))
    )


def _eager_loss(w: Workload) -> HeadMemory:
    logits = w.vocab_rows * w.tokens
    narrow = w.element_bytes * logits
    table = w.vocab_rows * w.weight_in_dim
    split = np.asarray(w.tensor > 1, dtype=float)
    cast = narrow if w.element_bytes < w.upcast_bytes else 0.0
    told = w.fixed.framework.logit_bytes
    if w.fixed.kernels == "compiled" and w.fixed.framework.compiled_logit_bytes >= 0:
        told = w.fixed.framework.compiled_logit_bytes
    if told >= 0:
        split, cast, more = np.ones_like(split), 0.0, (told - w.upcast_bytes) * logits
        narrow = min(told, w.element_bytes) * logits
        more = more + w.fixed.framework.stale_logit_bytes * logits * (w.microbatches > 1)
    else:
        more = 0.0
    own, met = _projection(w, table, narrow)
    gathered = w.hidden_activation_bytes * gathers_sequence(w)
    return HeadMemory(
        saved=norm_saved(w) + split * 10 * w.tokens,
        logits=w.upcast_bytes * logits,
        forward=np.maximum(
            split * (w.upcast_bytes * logits + cast)
            + (1 - split) * (2 * w.upcast_bytes * logits)
            + more,
            narrow + met,
        ),
        loss=split * cast + (1 - split) * (2 * w.upcast_bytes * logits) + more,
        projection=input_gradient_in_flight(w)
        + weight_gradient_peak(
            w, gathered + narrow + met, own, accumulated_gradient_bytes(w, table)
        ),
        norm=norm_backward(w),
    )


def _fused_loss(w: Workload) -> HeadMemory:
    """The loss of fused and compiled kernels: over a split vocabulary in place of the logits; else
    some tokens at a time, whose gradients, of the stream and of the weight, are kept until
    backward.
    """
    table, tokens = w.vocab_rows * w.weight_in_dim, w.tokens
    split = np.asarray(w.tensor > 1, dtype=float)
    narrow = w.element_bytes * w.vocab_rows * tokens
    own, met = _projection(w, table, narrow)
    gathered = w.hidden_activation_bytes * gathers_sequence(w)
    half = w.fixed.precision == "fp16"  # made unscaled, so kept in fp32
    made = (tokens * w.hidden_per_rank + table * has_weight_gradients(w)) * (
        w.upcast_bytes if half else w.element_bytes
    )
    room = (
        loss_chunk_tokens(tokens, w.hidden_per_rank, w.vocab_rows)
        * -(-w.vocab_rows // LOSS_CHUNK_ALIGNMENT)
        * LOSS_CHUNK_ALIGNMENT
        * w.element_bytes
    )
    return HeadMemory(
        saved=norm_saved(w)
        - (1 - split) * w.hidden_activation_bytes
        + split * w.upcast_bytes * tokens,
        logits=split * narrow + (1 - split) * made,
        forward=split * (narrow + met) + (1 - split) * (made + room + w.hidden_activation_bytes),
        loss=(1 - split) * half * made * w.element_bytes / w.upcast_bytes,
        projection=input_gradient_in_flight(w)
        + weight_gradient_peak(
            w, gathered + split * (narrow + met), split * own, accumulated_gradient_bytes(w, table)
        ),
        norm=norm_backward(w),
    )


def _projection(w: Workload, table: Number, narrow: Number) -> tuple[Number, Number]:
    """Bytes of the head's own weight gradient and of the blocks that meet where a grid splits it;
    3-D scatters the gradient once all else is gone.
    """
    algorithm = w.fixed.algorithm
    met = (
        grid_block_bytes(w, w.hidden_activation_bytes, table, narrow) if algorithm != "1d" else 0.0
    )
    return table * w.element_bytes * has_weight_gradients(w) * (algorithm != "3d"), met


def loss_chunk_tokens(tokens: Number, hidden: Number, vocab: Number) -> Number:
    """Tokens whose logits are there at once: `chunk_tokens` of
    `workbench.kernels.linear_cross_entropy`, of arrays.
    """
    runs = -(
        -tokens
        // np.maximum(
            np.maximum(LOSS_MIN_CHUNK_TOKENS, tokens * hidden // vocab),
            -(-tokens // LOSS_MAX_CHUNKS),
        )
    )
    return np.minimum(tokens, -(-tokens // (runs * LOSS_CHUNK_ALIGNMENT)) * LOSS_CHUNK_ALIGNMENT)
