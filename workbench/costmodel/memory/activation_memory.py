"""Activations: what each part of our modules saves for backward, and what comes and goes while it
runs.

The counts follow `models/` and `parallel/` line by line, with torch's eager operators. A peak is a
live set: every function says what is live at one instant beyond what is saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.costmodel.frameworks.framework_profile import WORKBENCH
from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.plan.attention_kernel import repeats_heads

GRADIENT_CAST_NUMEL = 2**22
"""Entries of a 16-bit gradient that are widened at once (`parallel/data/flat_buckets.py`)."""
MIN_FUSED_SEAM_NUMEL = 2**19
"""Entries below which a processor's fused seams stay plain (`kernels/fused_seams.py`)."""
ATEN_SEAMS = ("layernorm", "relu")
"""Kinds of seams that stay plain there whatever their size."""
TOKEN_ID_BYTES = 8
"""Bytes of a token id."""


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one layer and microbatch on one rank."""

    saved: Number
    """Held from forward to backward."""
    whole: Number
    """What its backward reads; selective recomputation brings back what is not held."""
    checkpoint: Number
    """Held instead where the layer is recomputed in full."""
    forward: Number
    """Temporaries at the end of its forward."""
    product: Number
    """Temporaries while the last of its products runs forward, its result among them."""
    transient: Number
    """Temporaries while its feed-forward runs backward, beside all that is saved."""
    columns: Number
    """Temporaries while its feed-forward's first products run backward, where tensor ranks gather
    their input.
    """
    fed: Number
    """Of what is saved, gone then."""
    released: Number
    """Of what is saved, gone when the norm before the feed-forward runs backward."""
    norm: Number
    """Temporaries then."""


def norm_saved(w: Workload, own_input: bool = True) -> Number:
    """One norm's saved tensors, its output among them; `own_input` where its input is a tensor of
    its own.

    Our rmsnorm keeps its input and one number a token, on every device; torch's layernorm its input
    and two, which the plain one on a processor keeps in the input's dtype.
    """
    stream = w.hidden_activation_bytes / w.sequence_parallel
    statistics = w.upcast_bytes * w.tokens / w.sequence_parallel
    if w.shape.norm == "layernorm":
        narrow = w.fixed.gpu.device == "cpu" and w.fixed.kernels != "compiled"
        return (1 + own_input) * stream + 2 * statistics * (
            w.element_bytes / w.upcast_bytes if narrow else 1
        )
    return (1 + own_input) * stream + statistics


def layer_activations(w: Workload, mixture: bool = False) -> LayerActivations:
    """One transformer layer; `mixture` where its feed-forward is a mixture of experts."""
    attention = (
        w.q_width + w.k_width + w.v_width + w.o_width
    ) * w.tokens * w.element_bytes + _ulysses_saved(w)
    attention = attention + repeated_kv_bytes(w) * (1 - w.searched.selective)
    statistics = 4 * w.heads * w.tokens
    wide, matrix = _feed_forward(w, mixture)
    ffn = _feed_forward_saved(w, mixture)
    saved = 2 * norm_saved(w) + _mla_latents(w) + attention + ffn
    kept = w.fixed.framework
    saved = saved + _fp8_saved_delta(w, mixture) - _frozen_inputs(w, wide)
    scores = (
        (2 + 3 * kept.dropout) * w.heads * w.tokens * w.fixed.sequence_length
        if kept.unfused
        else statistics
    )
    saved = (
        saved
        + kept.dropout * w.tokens * w.hidden_per_rank * 2 / w.sequence_parallel
        + scores * (1 - w.searched.selective)
    )
    whole = saved
    if kept.recompute_alternate_ops:
        saved = saved + w.searched.selective * (alternate_ops_saved(w, wide) - saved)
    elif kept.selective_saved_share >= 0:
        saved = whole = saved * (1 - w.searched.selective * (1 - kept.selective_saved_share))
    stream = w.hidden_activation_bytes / w.sequence_parallel
    gathered = w.hidden_activation_bytes - stream
    # Down projection: its input's gradient and its weight's, which is then added; the gate: two
    # more, one tensor gone.
    made, added = (
        wide + matrix * w.element_bytes * has_weight_gradients(w),
        accumulated_gradient_bytes(w, matrix),
    )
    transient = (
        np.maximum(np.maximum(made, added), (1 if w.shape.mlp == "gelu" else 2) * wide) + gathered
    )
    if (
        w.fixed.splits_backward and w.fixed.algorithm == "1d"
    ):  # no weight's gradient yet; the down projection's input stays
        transient = (2 if w.shape.mlp == "gelu" else 3) * wide + gathered
    branch = stream + (wide if w.shape.mlp == "relu" else 0.0)
    # What is gathered, the partial result, and the scattered one, without and with its bias.
    product = branch + (w.sequence_parallel > 1) * (
        stream * (1 + (w.shape.biases == "all")) + 2 * w.hidden_activation_bytes
    )
    if w.fixed.algorithm != "1d":
        met = grid_block_bytes(w, wide, matrix, w.hidden_activation_bytes)
        transient, product = transient + met, branch + stream + met
    checkpoint = stream * (1 - kept.offload_checkpoints)
    first = w.hidden_activation_bytes + (2 if w.shape.gated else 1) * wide
    columns = input_gradient_in_flight(w) + weight_gradient_peak(
        w, first, matrix * w.element_bytes * has_weight_gradients(w), added
    )
    columns = columns * gathers_sequence(w) * float(not mixture)
    released = ffn + norm_saved(w)
    return LayerActivations(
        saved,
        whole,
        checkpoint,
        branch,
        product,
        transient,
        columns,
        ffn,
        released,
        norm_backward(w),
    )


def gathers_sequence(w: Workload) -> Number:
    """1 where column-split layers of our own engine gather sequences
    (`parallel/tensor/column_parallel.py`).
    """
    return (w.sequence_parallel > 1) * float(w.fixed.stack == "workbench")


def input_gradient_in_flight(w: Workload) -> Number:
    """The gradient of what column-split layers multiplied, while it is summed: whole, and this
    rank's part of it.
    """
    return (
        w.hidden_activation_bytes
        + w.hidden_activation_bytes / w.sequence_parallel * gathers_sequence(w)
    )


def weight_gradient_peak(w: Workload, met: Number, own: Number, added: Number) -> Number:
    """The most beside a gradient in flight, while `met` becomes a weight's gradient of `own` bytes,
    and it is `added`.

    Where sequences are gathered, what was gathered from is gone when the weight's gradient is made.
    """
    gone = w.hidden_activation_bytes / w.sequence_parallel * gathers_sequence(w)
    return np.maximum(met + np.maximum(0.0, own - gone), added - gone)


def _ulysses_saved(w: Workload) -> Number:
    """What Ulysses keeps beside: repeated key-value heads, and the result both as heads and as
    tokens.
    """
    if w.fixed.context_algorithm == "ring" or not w.fixed.has_context_parallel:
        return 0.0
    more = (w.kv_head_repeats - 1) * (w.k_width + w.v_width) + w.o_width * (
        1 - w.searched.selective
    )
    return (w.searched.context > 1) * more * w.tokens * w.element_bytes


def repeated_kv_bytes(w: Workload) -> Number:
    """What attention keeps more where it repeats key-value heads, one for every query head
    (`plan/attention_kernel.py`).

    The others go, but for those that Ulysses has exchanged together with the queries. Ring
    attention is no seam of it.
    """
    s = w.fixed
    if s.stack != WORKBENCH or not repeats_heads(s.gpu, s.precision, w.shape):
        return 0.0
    spread = np.asarray(w.searched.context > 1)
    together = spread & (s.context_algorithm != "ring")
    fewer = w.k_width * np.where(together, w.kv_head_repeats, 1.0) < w.q_width
    kept = w.q_width + w.o_width - np.where(together, 0.0, w.k_width + w.v_width)
    alone = fewer & ~(spread & (s.context_algorithm == "ring"))
    return alone * kept * w.tokens * w.element_bytes


def grid_block_bytes(w: Workload, x: Number, matrix: Number, y: Number) -> Number:
    """Bytes of the others' blocks that a rank of a tensor grid holds while it multiplies an input
    of `x` bytes with a weight of `matrix` entries: one block of each, or all that it gathers and
    the partial result of `y` bytes.
    """
    if w.fixed.algorithm == "3d":
        return w.tiling.gathered_blocks * (x + y + matrix * w.element_bytes)
    return (w.tiling.hidden_parts > 1) * (x + matrix * w.element_bytes)


def alternate_ops_saved(w: Workload, wide: Number) -> Number:
    """What selective recomputation by operators holds: a layer's input, attention's output, and
    what every second product makes: queries, values, the gate (or the only wide one) and, after a
    gate, the down projection.

    A compiler drops the last, which no gradient reads.
    """
    stream = w.hidden_activation_bytes / w.sequence_parallel
    attention = (
        w.q_width + w.v_width + w.o_width
    ) * w.tokens * w.element_bytes + 4 * w.heads * w.tokens
    return (
        stream
        + attention
        + wide
        + w.hidden_activation_bytes * (w.shape.gated and w.fixed.kernels != "compiled")
    )


def has_weight_gradients(w: Workload) -> float:
    """1 where the model's own weights have gradients, 0 where they are frozen under adapters."""
    return float(w.fixed.adapter_rank == 0)


def _fp8_saved_delta(w: Workload, mixture: bool) -> Number:
    """What fp8 products change where they keep their inputs in 8 bits: norms' and feed-forward's
    results shrink to a byte, attention's needs a second, narrow copy.
    """
    if w.fixed.precision != "fp8" or not w.fixed.framework.fp8_saved_inputs:
        return 0.0
    wide, _ = _feed_forward(w, mixture)
    gate = (3 if w.shape.gated else 2) * wide
    return (
        w.o_width * w.tokens * w.element_bytes
        - 2 * w.hidden_activation_bytes / w.sequence_parallel
        - gate
    ) / 2


def _frozen_inputs(w: Workload, wide: Number) -> Number:
    """Inputs of the feed-forward's products, which only the gradients of frozen weights without
    adapters would read.
    """
    if not w.fixed.adapter_rank or w.fixed.adapts_all_projections:
        return 0.0
    return w.hidden_activation_bytes / w.sequence_parallel + wide


def _feed_forward(w: Workload, mixture: bool) -> tuple[Number, Number]:
    """(bytes of one ffn-wide tensor, parameters of its output projection)."""
    moe = w.shape.moe
    if not mixture or moe is None:
        return w.ffn * w.tokens * w.element_bytes, w.ffn * w.weight_in_dim
    wide = (w.routed_rows_per_token * w.expert_ffn + w.shared_ffn) * w.tokens * w.element_bytes
    return wide, w.expert_ffn * w.weight_in_dim


def _feed_forward_saved(w: Workload, mixture: bool) -> Number:
    """Gate, up, activated gate and product, or up and activated up (ReLU: that alone); a mixture
    also its tokens.
    """
    wide, _ = _feed_forward(w, mixture)
    made_again = runs_fused_seam(w, wide / w.element_bytes)
    gated = w.fixed.framework.gated_saved_tensors - made_again  # the activated gate
    kept = (gated if w.shape.gated else 1 if w.shape.mlp == "relu" else 2) * wide
    if mixture and w.shape.moe is not None:
        kept += (
            w.hidden_activation_bytes * (w.sequence_parallel > 1)
            + (w.routed_rows_per_token * 2 * w.hidden_activation_bytes)
            + w.shape.moe.experts * w.tokens * 4
        )
    return kept


def _mla_latents(w: Workload) -> Number:
    """MLA's compressed queries and keys, with their norms."""
    mla = w.shape.mla
    return (
        0.0
        if mla is None
        else 2.0
        * (mla.kv_rank + (mla.q_rank or 0))
        / w.tiling.hidden_parts
        * w.tokens
        * w.element_bytes
    )


def weight_gradient_bytes(w: Workload) -> Number:
    """Temporaries while the largest of a layer's weights gets its gradient, apart from its
    input's.
    """
    _, matrix = _feed_forward(w, False)
    return accumulated_gradient_bytes(w, matrix)


def accumulated_gradient_bytes(w: Workload, parameters: float) -> Number:
    """Bytes of a weight's gradient while it is added to its bucket, widened in pieces where dtypes
    differ.
    """
    widened = w.gradient_element_bytes * (w.gradient_element_bytes != w.element_bytes)
    return (
        parameters * w.element_bytes + np.minimum(parameters, GRADIENT_CAST_NUMEL) * widened
    ) * has_weight_gradients(w)


def norm_backward(w: Workload) -> Number:
    """Temporaries of a norm's backward, its own kept input among them; our plain rmsnorm works in
    fp32 or better.
    """
    stream, wider = (
        w.hidden_activation_bytes / w.sequence_parallel,
        w.upcast_bytes / w.element_bytes,
    )
    if w.shape.norm == "layernorm":
        return 3 * stream
    plain = stream * (2 + 3 * wider + (wider if wider > 1 else 0))
    return np.where(runs_fused_seam(w, stream / w.element_bytes), 3 * stream, plain)


def runs_fused_seam(w: Workload, entries: Number) -> Number:
    """Whether a seam of so many entries runs our own operator: fused ones leave a processor's small
    ones plain.
    """
    return w.uses_fused_kernels * (entries >= MIN_FUSED_SEAM_NUMEL * keeps_small_seams_eager(w))


def keeps_small_seams_eager(w: Workload) -> bool:
    """Whether fused kernels leave some seams plain: on processors, those that lose to eager by our
    own benchmark.
    """
    return w.uses_fused_kernels and w.fixed.gpu.device == "cpu" and w.fixed.kernels == "fused"


def boundary_bytes(w: Workload) -> tuple[Array, Array]:
    """(kept with a microbatch besides its layers, on the way to a neighbour) by pipeline rank.

    Kept: position tables, the embedding's masks; the received input is what the first norm keeps.
    On the way: an output until it is sent, however many microbatches are in flight.
    """
    length = w.fixed.sequence_length / w.searched.context
    rotary = length * (
        (w.shape.head_dim or 0) * w.element_bytes if w.shape.positions == "rope" else 0.0
    )
    kept = (
        w.zeros
        + (rotary + TOKEN_ID_BYTES * length) * w.fixed.chunks
        + (w.tensor > 1) * w.has_embedding * (TOKEN_ID_BYTES + 1) * w.tokens
    )
    boundary = w.hidden_activation_bytes / w.sequence_parallel
    return kept, np.asarray(
        (1 - w.has_head * (w.fixed.chunks == 1)) * boundary * float(w.pipeline > 1)
    )


def deferred_weight_bytes(w: Workload) -> Number:
    """Bytes that a layer keeps between its two halves of a backward: inputs and output gradients of
    its products.

    Where sequences are gathered, layers behind a gather do not wait: of the others the gradients
    are of all tokens. On a tensor grid none waits.
    """
    if w.fixed.algorithm != "1d":
        return w.zeros
    wide, _ = _feed_forward(w, False)
    widths = (w.q_width + w.k_width + w.v_width + w.o_width) * w.tokens * w.element_bytes
    every = 4 * w.hidden_activation_bytes + widths + (3 if w.shape.gated else 2) * wide
    rows = 2 * w.hidden_activation_bytes + w.o_width * w.tokens * w.element_bytes + wide
    return np.where(w.sequence_parallel > 1, rows, every)


def embedding_backward(w: Workload) -> Number:
    """Temporaries while the embedding runs backward: its gradients are dense, and a tied one is
    added to the head's.
    """
    table = w.vocab_rows * w.weight_in_dim * has_weight_gradients(w)
    positions = (
        w.shape.max_positions * w.weight_in_dim * has_weight_gradients(w)
        if w.shape.positions == "learned"
        else 0.0
    )
    made = w.hidden_activation_bytes + np.maximum(table, positions) * w.element_bytes
    if (
        w.fixed.framework.gradients_freed_after_step
    ):  # the gradient that is made is the one that is kept
        return made
    if has_tied_head_on_rank(w):
        return np.maximum(
            np.maximum(made, 2 * table * w.element_bytes) + table * w.element_bytes,
            accumulated_gradient_bytes(w, table),
        )
    return np.maximum(made, accumulated_gradient_bytes(w, np.maximum(table, positions)))


def has_tied_head_on_rank(w: Workload) -> bool:
    """Whether one rank's embedding and head share a weight: then the head's gradient waits for the
    embedding's.
    """
    return w.shape.tied and w.pipeline == 1 and w.fixed.adapter_rank == 0
