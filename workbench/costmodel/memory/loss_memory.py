"""Memory of the final norm, the head and the loss, by what makes the loss."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.activation_memory import (
    added_gradient,
    blocks,
    gathers,
    in_flight,
    leaves_plain,
    made_of,
    norm_backward,
    norm_saved,
    trained,
)

LEAST_TOKENS, MOST_RUNS, ALIGNED = 1024, 8, 64
"""Of the chunked loss (`workbench.kernels.linear_cross_entropy`): a run's least tokens, the most
runs, and what a run's tokens and its room for logits are multiples of.
"""

PLAIN_BELOW = 2**22
"""Logits of a split vocabulary below which a processor's fused loss stays plain
(`kernels/fused_seams.py`).
"""


@dataclass(frozen=True)
class Head:
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


def head(w: Workload) -> Head:
    """The final norm and the loss; over a split vocabulary the loss is our own and works in
    place.
    """
    if not w.fused:
        return _plain(w)
    own, split = _fused(w), w.tensor > 1
    few = split & (w.vocab * w.tokens < PLAIN_BELOW) & leaves_plain(w)
    if not np.any(few):
        return own
    return Head(
        *(np.where(few, plain, mine) for plain, mine in zip(astuple(_plain(w)), astuple(own)))
    )


def _plain(w: Workload) -> Head:
    logits = w.vocab * w.tokens
    narrow = w.element * logits
    table = w.vocab * w.height
    split = np.asarray(w.tensor > 1, dtype=float)
    cast = narrow if w.element < w.wide else 0.0
    told = w.setting.software.logit_bytes
    if w.setting.kernels == "compiled" and w.setting.software.compiled_logit_bytes >= 0:
        told = w.setting.software.compiled_logit_bytes
    if told >= 0:
        split, cast, more = np.ones_like(split), 0.0, (told - w.wide) * logits
        narrow = min(told, w.element) * logits
        more = more + w.setting.software.logit_stale * logits * (w.microbatches > 1)
    else:
        more = 0.0
    own, met = _projection(w, table, narrow)
    gathered = w.stream * gathers(w)
    return Head(
        saved=norm_saved(w) + split * 10 * w.tokens,
        logits=w.wide * logits,
        forward=np.maximum(
            split * (w.wide * logits + cast) + (1 - split) * (2 * w.wide * logits) + more,
            narrow + met,
        ),
        loss=split * cast + (1 - split) * (2 * w.wide * logits) + more,
        projection=in_flight(w)
        + made_of(w, gathered + narrow + met, own, added_gradient(w, table)),
        norm=norm_backward(w),
    )


def _fused(w: Workload) -> Head:
    """The loss of fused and compiled kernels: over a split vocabulary in place of the logits; else
    some tokens at a time, whose gradients, of the stream and of the weight, are kept until
    backward.
    """
    table, tokens = w.vocab * w.height, w.tokens
    split = np.asarray(w.tensor > 1, dtype=float)
    narrow = w.element * w.vocab * tokens
    own, met = _projection(w, table, narrow)
    gathered = w.stream * gathers(w)
    half = w.setting.precision == "fp16"  # made unscaled, so kept in fp32
    made = (tokens * w.hidden + table * trained(w)) * (w.wide if half else w.element)
    room = run_tokens(tokens, w.hidden, w.vocab) * -(-w.vocab // ALIGNED) * ALIGNED * w.element
    return Head(
        saved=norm_saved(w) - (1 - split) * w.stream + split * w.wide * tokens,
        logits=split * narrow + (1 - split) * made,
        forward=split * (narrow + met) + (1 - split) * (made + room + w.stream),
        loss=(1 - split) * half * made * w.element / w.wide,
        projection=in_flight(w)
        + made_of(w, gathered + split * (narrow + met), split * own, added_gradient(w, table)),
        norm=norm_backward(w),
    )


def _projection(w: Workload, table: Number, narrow: Number) -> tuple[Number, Number]:
    """Bytes of the head's own weight gradient and of the blocks that meet where a grid splits it;
    3-D scatters the gradient once all else is gone.
    """
    algorithm = w.setting.algorithm
    met = blocks(w, w.stream, table, narrow) if algorithm != "1d" else 0.0
    return table * w.element * trained(w) * (algorithm != "3d"), met


def run_tokens(tokens: Number, hidden: Number, vocab: Number) -> Number:
    """Tokens whose logits are there at once: `chunk_tokens` of
    `workbench.kernels.linear_cross_entropy`, of arrays.
    """
    runs = -(
        -tokens
        // np.maximum(np.maximum(LEAST_TOKENS, tokens * hidden // vocab), -(-tokens // MOST_RUNS))
    )
    return np.minimum(tokens, -(-tokens // (runs * ALIGNED)) * ALIGNED)
