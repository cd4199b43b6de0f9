"""Activations: what each part of our modules saves for backward, and what comes and goes while it
runs.

The counts follow `models/` and `parallel/` line by line, with torch's eager operators. A peak is a
live set: every function says what is live at one instant beyond what is saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.costmodel.frameworks.framework_profile import OWN
from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.plan.attention_kernel import repeats_heads

PIECE = 2**22
"""Entries of a 16-bit gradient that are widened at once (`parallel/data/flat_buckets.py`)."""
PLAIN_BELOW = 2**19
"""Entries below which a processor's fused seams stay plain (`kernels/fused_seams.py`)."""
ATEN = ("layernorm", "relu")
"""Kinds of seams that stay plain there whatever their size."""
INDEX = 8
"""Bytes of a token id."""


@dataclass(frozen=True)
class Layer:
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
    stream = w.stream / w.sequence_parallel
    statistics = w.wide * w.tokens / w.sequence_parallel
    if w.shape.norm == "layernorm":
        narrow = w.setting.card.device == "cpu" and w.setting.kernels != "compiled"
        return (1 + own_input) * stream + 2 * statistics * (w.element / w.wide if narrow else 1)
    return (1 + own_input) * stream + statistics


def layer(w: Workload, mixture: bool = False) -> Layer:
    """One transformer layer; `mixture` where its feed-forward is a mixture of experts."""
    attention = (w.q_width + w.k_width + w.v_width + w.o_width) * w.tokens * w.element + _exchanged(
        w
    )
    attention = attention + repeated_heads(w) * (1 - w.knobs.selective)
    statistics = 4 * w.heads * w.tokens
    wide, matrix = _feed_forward(w, mixture)
    ffn = _feed_forward_saved(w, mixture)
    saved = 2 * norm_saved(w) + _latent(w) + attention + ffn
    kept = w.setting.software
    saved = saved + _narrowed(w, mixture) - _unneeded(w, wide)
    scores = (
        (2 + 3 * kept.dropout) * w.heads * w.tokens * w.setting.sequence_length
        if kept.unfused
        else statistics
    )
    saved = (
        saved
        + kept.dropout * w.tokens * w.hidden * 2 / w.sequence_parallel
        + scores * (1 - w.knobs.selective)
    )
    whole = saved
    if kept.every_other:
        saved = saved + w.knobs.selective * (every_other(w, wide) - saved)
    elif kept.selective >= 0:
        saved = whole = saved * (1 - w.knobs.selective * (1 - kept.selective))
    stream = w.stream / w.sequence_parallel
    gathered = w.stream - stream
    # Down projection: its input's gradient and its weight's, which is then added; the gate: two
    # more, one tensor gone.
    made, added = wide + matrix * w.element * trained(w), added_gradient(w, matrix)
    transient = (
        np.maximum(np.maximum(made, added), (1 if w.shape.mlp == "gelu" else 2) * wide) + gathered
    )
    if (
        w.setting.split and w.setting.algorithm == "1d"
    ):  # no weight's gradient yet; the down projection's input stays
        transient = (2 if w.shape.mlp == "gelu" else 3) * wide + gathered
    branch = stream + (wide if w.shape.mlp == "relu" else 0.0)
    # What is gathered, the partial result, and the scattered one, without and with its bias.
    product = branch + (w.sequence_parallel > 1) * (
        stream * (1 + (w.shape.biases == "all")) + 2 * w.stream
    )
    if w.setting.algorithm != "1d":
        met = blocks(w, wide, matrix, w.stream)
        transient, product = transient + met, branch + stream + met
    checkpoint = stream * (1 - kept.offload_checkpoints)
    first = w.stream + (2 if w.shape.gated else 1) * wide
    columns = in_flight(w) + made_of(w, first, matrix * w.element * trained(w), added)
    columns = columns * gathers(w) * float(not mixture)
    released = ffn + norm_saved(w)
    return Layer(
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


def gathers(w: Workload) -> Number:
    """1 where column-split layers of our own engine gather sequences
    (`parallel/tensor/column_parallel.py`).
    """
    return (w.sequence_parallel > 1) * float(w.setting.stack == "workbench")


def in_flight(w: Workload) -> Number:
    """The gradient of what column-split layers multiplied, while it is summed: whole, and this
    rank's part of it.
    """
    return w.stream + w.stream / w.sequence_parallel * gathers(w)


def made_of(w: Workload, met: Number, own: Number, added: Number) -> Number:
    """The most beside a gradient in flight, while `met` becomes a weight's gradient of `own` bytes,
    and it is `added`.

    Where sequences are gathered, what was gathered from is gone when the weight's gradient is made.
    """
    gone = w.stream / w.sequence_parallel * gathers(w)
    return np.maximum(met + np.maximum(0.0, own - gone), added - gone)


def _exchanged(w: Workload) -> Number:
    """What Ulysses keeps beside: repeated key-value heads, and the result both as heads and as
    tokens.
    """
    if w.setting.context_algorithm == "ring" or not w.setting.contexts:
        return 0.0
    more = (w.repeated_heads - 1) * (w.k_width + w.v_width) + w.o_width * (1 - w.knobs.selective)
    return (w.knobs.context > 1) * more * w.tokens * w.element


def repeated_heads(w: Workload) -> Number:
    """What attention keeps more where it repeats key-value heads, one for every query head
    (`plan/attention_kernel.py`).

    The others go, but for those that Ulysses has exchanged together with the queries. Ring
    attention is no seam of it.
    """
    s = w.setting
    if s.stack != OWN or not repeats_heads(s.card, s.precision, w.shape):
        return 0.0
    spread = np.asarray(w.knobs.context > 1)
    together = spread & (s.context_algorithm != "ring")
    fewer = w.k_width * np.where(together, w.repeated_heads, 1.0) < w.q_width
    kept = w.q_width + w.o_width - np.where(together, 0.0, w.k_width + w.v_width)
    alone = fewer & ~(spread & (s.context_algorithm == "ring"))
    return alone * kept * w.tokens * w.element


def blocks(w: Workload, x: Number, matrix: Number, y: Number) -> Number:
    """Bytes of the others' blocks that a rank of a tensor grid holds while it multiplies an input
    of `x` bytes with a weight of `matrix` entries: one block of each, or all that it gathers and
    the partial result of `y` bytes.
    """
    if w.setting.algorithm == "3d":
        return w.tiling.gathered * (x + y + matrix * w.element)
    return (w.tiling.hidden > 1) * (x + matrix * w.element)


def every_other(w: Workload, wide: Number) -> Number:
    """What selective recomputation by operators holds: a layer's input, attention's output, and
    what every second product makes: queries, values, the gate (or the only wide one) and, after a
    gate, the down projection.

    A compiler drops the last, which no gradient reads.
    """
    stream = w.stream / w.sequence_parallel
    attention = (w.q_width + w.v_width + w.o_width) * w.tokens * w.element + 4 * w.heads * w.tokens
    return (
        stream + attention + wide + w.stream * (w.shape.gated and w.setting.kernels != "compiled")
    )


def trained(w: Workload) -> float:
    """1 where the model's own weights have gradients, 0 where they are frozen under adapters."""
    return float(w.setting.adapter_rank == 0)


def _narrowed(w: Workload, mixture: bool) -> Number:
    """What fp8 products change where they keep their inputs in 8 bits: norms' and feed-forward's
    results shrink to a byte, attention's needs a second, narrow copy.
    """
    if w.setting.precision != "fp8" or not w.setting.software.narrow_inputs:
        return 0.0
    wide, _ = _feed_forward(w, mixture)
    gate = (3 if w.shape.gated else 2) * wide
    return (w.o_width * w.tokens * w.element - 2 * w.stream / w.sequence_parallel - gate) / 2


def _unneeded(w: Workload, wide: Number) -> Number:
    """Inputs of the feed-forward's products, which only the gradients of frozen weights without
    adapters would read.
    """
    if not w.setting.adapter_rank or w.setting.adapter_everywhere:
        return 0.0
    return w.stream / w.sequence_parallel + wide


def _feed_forward(w: Workload, mixture: bool) -> tuple[Number, Number]:
    """(bytes of one ffn-wide tensor, parameters of its output projection)."""
    moe = w.shape.moe
    if not mixture or moe is None:
        return w.ffn * w.tokens * w.element, w.ffn * w.height
    wide = (w.visits * w.expert_ffn + w.shared_ffn) * w.tokens * w.element
    return wide, w.expert_ffn * w.height


def _feed_forward_saved(w: Workload, mixture: bool) -> Number:
    """Gate, up, activated gate and product, or up and activated up (ReLU: that alone); a mixture
    also its tokens.
    """
    wide, _ = _feed_forward(w, mixture)
    made_again = replaced(w, wide / w.element)
    gated = w.setting.software.gated_kept - made_again  # the activated gate
    kept = (gated if w.shape.gated else 1 if w.shape.mlp == "relu" else 2) * wide
    if mixture and w.shape.moe is not None:
        kept += (
            w.stream * (w.sequence_parallel > 1)
            + (w.visits * 2 * w.stream)
            + w.shape.moe.experts * w.tokens * 4
        )
    return kept


def _latent(w: Workload) -> Number:
    """MLA's compressed queries and keys, with their norms."""
    mla = w.shape.mla
    return (
        0.0
        if mla is None
        else 2.0 * (mla.kv_rank + (mla.q_rank or 0)) / w.tiling.hidden * w.tokens * w.element
    )


def weights(w: Workload) -> Number:
    """Temporaries while the largest of a layer's weights gets its gradient, apart from its
    input's.
    """
    _, matrix = _feed_forward(w, False)
    return added_gradient(w, matrix)


def added_gradient(w: Workload, parameters: float) -> Number:
    """Bytes of a weight's gradient while it is added to its bucket, widened in pieces where dtypes
    differ.
    """
    widened = w.gradient_element * (w.gradient_element != w.element)
    return (parameters * w.element + np.minimum(parameters, PIECE) * widened) * trained(w)


def norm_backward(w: Workload) -> Number:
    """Temporaries of a norm's backward, its own kept input among them; our plain rmsnorm works in
    fp32 or better.
    """
    stream, wider = w.stream / w.sequence_parallel, w.wide / w.element
    if w.shape.norm == "layernorm":
        return 3 * stream
    plain = stream * (2 + 3 * wider + (wider if wider > 1 else 0))
    return np.where(replaced(w, stream / w.element), 3 * stream, plain)


def replaced(w: Workload, entries: Number) -> Number:
    """Whether a seam of so many entries runs our own operator: fused ones leave a processor's small
    ones plain.
    """
    return w.fused * (entries >= PLAIN_BELOW * leaves_plain(w))


def leaves_plain(w: Workload) -> bool:
    """Whether fused kernels leave some seams plain: on processors, those that lose to eager by our
    own benchmark.
    """
    return w.fused and w.setting.card.device == "cpu" and w.setting.kernels == "fused"


def ends(w: Workload) -> tuple[Array, Array]:
    """(kept with a microbatch besides its layers, on the way to a neighbour) by pipeline rank.

    Kept: position tables, the embedding's masks; the received input is what the first norm keeps.
    On the way: an output until it is sent, however many microbatches are in flight.
    """
    length = w.setting.sequence_length / w.knobs.context
    rotary = length * ((w.shape.head_dim or 0) * w.element if w.shape.positions == "rope" else 0.0)
    kept = (
        w.nothing
        + (rotary + INDEX * length) * w.setting.chunks
        + (w.tensor > 1) * w.first * (INDEX + 1) * w.tokens
    )
    boundary = w.stream / w.sequence_parallel
    return kept, np.asarray(
        (1 - w.last * (w.setting.chunks == 1)) * boundary * float(w.pipeline > 1)
    )


def aside(w: Workload) -> Number:
    """Bytes that a layer keeps between its two halves of a backward: inputs and output gradients of
    its products.

    Where sequences are gathered, layers behind a gather do not wait: of the others the gradients
    are of all tokens. On a tensor grid none waits.
    """
    if w.setting.algorithm != "1d":
        return w.nothing
    wide, _ = _feed_forward(w, False)
    widths = (w.q_width + w.k_width + w.v_width + w.o_width) * w.tokens * w.element
    every = 4 * w.stream + widths + (3 if w.shape.gated else 2) * wide
    rows = 2 * w.stream + w.o_width * w.tokens * w.element + wide
    return np.where(w.sequence_parallel > 1, rows, every)


def embedding(w: Workload) -> Number:
    """Temporaries while the embedding runs backward: its gradients are dense, and a tied one is
    added to the head's.
    """
    table = w.vocab * w.height * trained(w)
    positions = (
        w.shape.max_positions * w.height * trained(w) if w.shape.positions == "learned" else 0.0
    )
    made = w.stream + np.maximum(table, positions) * w.element
    if w.setting.software.late_gradients:  # the gradient that is made is the one that is kept
        return made
    if shared_here(w):
        return np.maximum(
            np.maximum(made, 2 * table * w.element) + table * w.element, added_gradient(w, table)
        )
    return np.maximum(made, added_gradient(w, np.maximum(table, positions)))


def shared_here(w: Workload) -> bool:
    """Whether one rank's embedding and head share a weight: then the head's gradient waits for the
    embedding's.
    """
    return w.shape.tied and w.pipeline == 1 and w.setting.adapter_rank == 0
