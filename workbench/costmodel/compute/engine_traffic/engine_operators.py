"""What this engine's memory-bound operators move, counted one by one as they run on a GPU.

Each operator reads its operands once and writes its results: those of `models/seams.py`,
`models/moe.py` and `parallel/` where they are eager, and of `kernels/` where they are fused. Other
frameworks' operators are a textbook count times a factor (`memory_bound_pass`). The
comments name the operators in the order in which they run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.costmodel.compute.engine_traffic.float8_operators import float8_bytes
from workbench.costmodel.compute.engine_traffic.moe_layer_bytes import (
    MoeLayerSizes,
    moe_layer_bytes,
)
from workbench.costmodel.compute.engine_traffic.moved_bytes import MovedBytes, moved_by
from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.activation_memory import has_weight_gradients
from workbench.runtime_facts.loss_chunks import loss_chunk_tokens
from workbench.runtime_facts.offload_sizes import stepped_bytes


def counts_operators(w: Workload) -> bool:
    """Whether a plan runs operators that are counted here, on a GPU."""
    return w.fixed.framework.kernels.counts_operators and w.fixed.gpu.device == "cuda"


class LayerParts(NamedTuple):
    """Bytes of one layer and microbatch by what its backward is part of, GEMMs and attention
    apart.
    """

    first_norm: MovedBytes
    last_norm: MovedBytes
    """Of the feed-forward layer, where branches do not share the first."""
    attention: MovedBytes
    attention_sums: MovedBytes
    """Sums of the gradients of what queries, keys and values are made of."""
    feed_forward: MovedBytes
    feed_forward_sums: MovedBytes
    """Sum of both gradients of the input of a gated layer; of an MoE layer part of the other."""


def layer_bytes(w: Workload, is_moe: bool) -> MovedBytes:
    """Bytes of one layer and microbatch, GEMMs and attention apart."""
    return sum(layer_parts(w, is_moe), start=MovedBytes())


def layer_parts(w: Workload, is_moe: bool) -> LayerParts:
    """The same by part."""
    t, h = w.tokens, w.hidden_per_rank
    first, last = (norm.wide(t * h / w.sequence_parallel) for norm in _residual_bytes(w))
    sums = 1.0 * (w.tensor == 1)  # column-parallel layers add the gradients of their input in GEMMs
    sum_bytes = 3 * w.element_bytes
    of_attention = moved_by([], [sum_bytes, sum_bytes]).wide(t * h * sums)  # of q, k and v
    own, of_input = MovedBytes(), MovedBytes()
    if is_moe and w.shape.moe:
        own += routing_bytes(w) + activation_bytes(w).wide(
            w.tokens * w.routed_rows_per_token * w.expert_ffn
        )
        own += _shared_bytes(w) if w.shape.moe.shared else MovedBytes()
    else:
        own += _mlp_bytes(w, w.ffn) + (float8_bytes(w) if casts_eagerly(w) else MovedBytes())
        of_input += _input_sum(w, sums)
    return LayerParts(first, last, _attention_bytes(w), of_attention, own, of_input)


def casts_eagerly(w: Workload) -> bool:
    """Whether linear layers are torchao's in fp8: those of dense models of this engine."""
    return w.fixed.precision == "fp8" and w.shape.moe is None and w.shape.mla is None


def _residual_bytes(w: Workload) -> tuple[MovedBytes, MovedBytes]:
    """Bytes an element of a layer's norms of the residual stream and of its additions.

    Parallel branches are added to each other; where they share a norm, backward adds its two
    gradients.
    """
    e, norm = w.element_bytes, norm_bytes(w, True)
    if w.shape.parallel_residual == "one_norm":
        return norm, moved_by([3 * e], [3 * e])
    if w.shape.parallel_residual == "two_norms" and w.uses_fused_kernels:
        # The second norm is fused with no addition.
        return norm, moved_by([2 * e, 3 * e], [3 * e, 3 * e])
    return norm, norm


def norm_bytes(w: Workload, in_layer: bool) -> MovedBytes:
    """Bytes an element of a residual addition and a norm.

    Args:
        w: Per-rank problem sizes.
        in_layer: Whether the sum goes on as residual, so that backward adds its two gradients.
    """
    e = w.element_bytes
    if w.uses_fused_kernels:
        return moved_by([4 * e], [(3 + in_layer) * e])
    joined: list[Number] = [3 * e] if in_layer else []
    if w.shape.norm == "layernorm":
        # Two kernels of backward read gradient and input (`layer_norm_kernel.cu`).
        return moved_by([3 * e, 2 * e], [(3 + 2 * has_weight_gradients(w)) * e, *joined])
    return moved_by([3 * e], joined) + _eager_rmsnorm_bytes(w)


def _eager_rmsnorm_bytes(w: Workload) -> MovedBytes:
    """Bytes an element of an RMSNorm by plain operators."""
    e, u = w.element_bytes, w.upcast_bytes
    cast, trained = (e + u) * (e < u), has_weight_gradients(w)
    of_weight = [3 * u * trained, u * trained]
    return moved_by(
        [cast, 2 * u, u, 2 * u, cast, 2 * e],
        [cast, cast, 2 * u, *of_weight, 2 * u, 3 * u, u, 2 * u, 3 * u, 2 * u, cast],
    )


def _head_norm_bytes(w: Workload) -> MovedBytes:
    """Bytes of norms of queries' and keys' heads, which add no residual."""
    if not w.shape.qk_norm:
        return MovedBytes()
    e = w.element_bytes
    each = moved_by([2 * e], [3 * e]) if w.uses_fused_kernels else _eager_rmsnorm_bytes(w)
    return each.wide(w.tokens * w.q_width) + each.wide(w.tokens * w.k_width)


def _attention_bytes(w: Workload) -> MovedBytes:
    """Rotary positions, biases, and what context parallelism does around attention."""
    e, t = w.element_bytes, w.tokens
    found = _head_norm_bytes(w)
    if w.shape.positions == "rope":
        found += rope_bytes(w, t * w.q_width, t * w.k_width)
        found += _unrotated_bytes(w)
    if w.shape.biases in ("qkv", "all"):
        for width in (w.q_width, w.k_width, w.v_width):
            found += moved_by([], [e * has_weight_gradients(w)]).wide(t * width)
    return (
        found
        + _row_parallel_bias(w)
        + (ulysses_bytes(w) if w.fixed.has_context_parallel else MovedBytes())
    )


def rope_bytes(w: Workload, queries: Number, keys: Number) -> MovedBytes:
    """Bytes of rotating so many elements of queries and of keys."""
    e = w.element_bytes
    if w.uses_fused_kernels:
        return moved_by([2 * e], [2 * e]).wide(queries + keys)
    # Four products, each with half the elements, their sums, and the concatenation; of queries
    # and of keys.
    turned = moved_by([e] * 4 + [1.5 * e] * 2 + [2 * e], [e] * 5 + [1.5 * e] * 2 + [2 * e])
    return turned.wide(queries) + turned.wide(keys)


def _unrotated_bytes(w: Workload) -> MovedBytes:
    """What fewer rotated entries of heads change: the others are copied, in either direction, and
    eager operators rotate, also where seams are fused.
    """
    if w.shape.rotary_dim is None:
        return MovedBytes()
    e, elements = w.element_bytes, w.tokens * (w.q_width + w.k_width)
    share = w.shape.rotated_width / int(w.shape.head_dim or 1)
    forward, backward = 7.0 * e, 8.0 * e  # products and sums of a rotated element
    if w.uses_fused_kernels:
        return moved_by([forward * share], [backward * share]).wide(elements)
    return moved_by([-forward * (1 - share)], [-backward * (1 - share)]).wide(elements)


def dropout_bytes(w: Workload, drawn: float) -> Number:
    """Bytes of dropping both branches of a layer, in forward and again in backward.

    Args:
        w: Per-rank problem sizes.
        drawn: Bytes an entry of drawing a mask and dropping by it by plain operators.
    """
    if not w.fixed.dropout:
        return 0.0
    return 2 * dropped_bytes(w, drawn) * w.tokens * w.hidden_per_rank / w.sequence_parallel


def dropped_bytes(w: Workload, drawn: float) -> float:
    """Bytes of dropping an element; `drawn` as in `dropout_bytes`."""
    return 2.0 * w.element_bytes if w.uses_fused_kernels else drawn


def ulysses_bytes(w: Workload) -> MovedBytes:
    """Copies around the all-to-alls of Ulysses: heads of queries, keys and values are joined and
    put in the order of ranks, and again after the exchange where a microbatch has several
    sequences.
    """
    e = w.element_bytes
    joined = w.q_width + w.kv_head_repeats * (w.k_width + w.v_width)
    several = 2 * e * (w.sequences > 1)
    found = moved_by([2 * e, 2 * e, several], [2 * e, 2 * e, several]).wide(w.tokens * joined)
    found += moved_by([2 * e, several], [2 * e, several]).wide(w.tokens * w.attended_width)
    return found.times(1.0 * (w.ulysses > 1))


def attention_bytes(w: Workload) -> MovedBytes:
    """What merging the blocks of ring attention moves, in fp32 or better, and copying key-value
    heads for a kernel that takes as many as of queries.

    Of a ring's ranks this is the first: at each step half of its queries see keys of another rank.
    """
    e, u, t, keys = w.element_bytes, w.upcast_bytes, w.tokens, w.k_width + w.v_width
    cast = (e + u) * (e < u)
    found = MovedBytes()
    if w.fixed.has_context_parallel and w.fixed.context_algorithm != "ulysses":
        steps, half = (w.ring - 1) * 1.0, 0.5
        merge = moved_by([cast, 2 * u, 2 * u, 2 * u, 3 * u, 2 * u], [2 * u + e, 2 * u])
        found += moved_by([cast, cast], [cast, cast]).wide(t * w.attended_width)
        found += merge.wide(half * t * w.attended_width).times(steps)
        found += moved_by([2 * e], [2 * e, 2 * e, cast, u, 3 * u, cast]).wide(t * keys)
        found += moved_by([], [2 * e, 2 * u + e, 2 * u]).wide(t * keys).times(steps)
        found = found.times(1.0 * (w.ring > 1))
    if w.fixed.attention in ("efficient", "math") and w.shape.kv_heads != w.shape.heads:
        copied = (keys + 2 * w.q_width) * e
        found += moved_by([copied], [copied]).wide(t)
    return found + math_attention_bytes(w) if w.fixed.attention == "math" else found


def math_attention_bytes(w: Workload) -> MovedBytes:
    """Attention in plain operators, its batched GEMMs apart, which are six in place of three
    kernels: operands and scores in fp32 or better, and an additive mask.
    """
    e, u, t, length = w.element_bytes, w.upcast_bytes, w.tokens, w.fixed.sequence_length
    cast = (e + u) * (e < u)
    found = moved_by([cast] * 4 + [2 * u] * 2 + [2 * e], [cast] * 4 + [2 * u] * 2 + [2 * e])
    found = found.wide(t * w.q_width)
    # The mask is made of truth values, added to the scores, and read by all heads at once.
    found += moved_by([1, 2, 5, u], []).wide(length**2)
    found += moved_by([2 * u, 2 * u, cast], [3 * u]).wide(w.heads * t * length)
    return found + MovedBytes(0.0, 0.0, 2.0, 2.0)


def _row_parallel_bias(w: Workload) -> MovedBytes:
    """Bias of the output or down projection: part of its GEMM, but for row-parallel ones, which add
    it after the sum over ranks.
    """
    if w.shape.biases != "all":
        return MovedBytes()
    e, apart = w.element_bytes, 1.0 * (w.tensor > 1)
    own = w.tokens * w.hidden_per_rank / w.sequence_parallel
    return moved_by([2 * e * apart], [e * has_weight_gradients(w)]).wide(own)


def _mlp_bytes(w: Workload, width: Number) -> MovedBytes:
    """Activation and biases of a feed-forward layer."""
    e, t = w.element_bytes, w.tokens
    found = activation_bytes(w).wide(t * width) + _row_parallel_bias(w)
    if w.shape.biases == "all":
        found += (
            moved_by([], [e * has_weight_gradients(w)]).wide(t * width).times(1 + w.shape.gated)
        )
    return found


def _input_sum(w: Workload, sums: Number) -> MovedBytes:
    """Sum of both gradients of a gated layer's input."""
    if not w.shape.gated:
        return MovedBytes()
    return moved_by([], [3 * w.element_bytes]).wide(w.tokens * w.hidden_per_rank * sums)


def activation_bytes(w: Workload) -> MovedBytes:
    """Bytes an element of an activation, gated or not."""
    e = w.element_bytes
    if not w.shape.gated:
        return moved_by([2 * e], [3 * e])
    if w.uses_fused_kernels:
        return moved_by([3 * e], [5 * e])
    return moved_by([2 * e, 3 * e], [3 * e, 3 * e, 3 * e])


def routing_bytes(w: Workload) -> MovedBytes:
    """Router, dispatch, combine, and the weights' gradients of the experts."""
    moe = w.shape.moe
    assert moe is not None
    local = moe.experts / w.searched.expert
    matrices = local * w.expert_ffn * w.hidden_per_rank * (2 + w.shape.gated)
    found = moe_layer_bytes(
        MoeLayerSizes(
            w.tokens,
            w.routed_rows_per_token,
            w.hidden_per_rank,
            moe.experts,
            moe.top_k,
            bool(moe.shared),
            w.shape.gated,
            matrices * has_weight_gradients(w),
            has_weight_gradients(w) > 0,
        ),
        w.element_bytes,
        w.fixed.precision == "bf16",
    )
    # Rows arrive by source rank, and are sorted by expert and back.
    sorts = 2.0 * ((w.searched.expert > 1) & (local > 1))
    rows = w.tokens * w.routed_rows_per_token * w.hidden_per_rank
    return found + moved_by([2 * w.element_bytes], [2 * w.element_bytes]).wide(rows).times(sorts)


def _shared_bytes(w: Workload) -> MovedBytes:
    """Shared experts, and the sum of their outputs and the routed ones'."""
    total = moved_by([3 * w.element_bytes], []).wide(w.tokens * w.hidden_per_rank)
    return _mlp_bytes(w, w.shared_ffn) + _input_sum(w, 1.0 * (w.tensor == 1)) + total


def head_bytes(w: Workload) -> MovedBytes:
    """Final norm, and the loss over the logits of a rank."""
    e, t, h = w.element_bytes, w.tokens, w.hidden_per_rank
    logits, split = t * w.vocab_rows, 1.0 * (w.tensor > 1)
    found = norm_bytes(w, False).wide(t * h / w.sequence_parallel)
    if not w.uses_fused_kernels:
        return found + loss_bytes(w, split).wide(logits)
    # Split: statistics, then the gradient in place. Whole: both in one kernel where it is Triton's,
    # in forward; backward scales both gradients.
    one = 1 if w.fixed.kernels == "fused" else 2
    wide = e if w.fixed.precision != "fp16" else 4
    whole = moved_by([(one + 1) * e], []).wide(logits)
    if w.fixed.has_pairs:  # forward reads the logits; backward, with tokens' factors, does the rest
        whole = moved_by([e], [(one + 1) * e]).wide(logits)
        return found + loss_bytes(w, split).wide(logits).times(split) + whole.times(1 - split)
    of_weight = (wide + e) * has_weight_gradients(w)
    whole += moved_by([], [wide + e]).wide(t * h) + moved_by([], [of_weight]).wide(w.table_params)
    return found + loss_bytes(w, split).wide(logits).times(split) + whole.times(1 - split)


def loss_bytes(w: Workload, split: Number) -> MovedBytes:
    """Bytes an element of the loss of logits that there are; `split` is 1 where ranks share the
    vocabulary.
    """
    e, u = w.element_bytes, w.upcast_bytes
    if w.uses_fused_kernels:
        return moved_by([e], [2 * e])
    # Log-softmax and the loss; vocabulary-parallel: maximum, difference, exponentials, their sum
    # and quotient, in place.
    cast = (e + u) * (e < u)
    whole = moved_by([cast, 2 * u], [u, 3 * u, cast])
    parts = moved_by([cast, u, 2 * u, 2 * u, u, 2 * u], [2 * u, cast])
    return whole.times(1 - split) + parts.times(split)


def chunked_head(w: Workload, tokens: Number) -> Number:
    """Rows of a GEMM of the head: fused kernels project tokens in chunks, but for a head that is
    split over ranks.
    """
    if not w.uses_fused_kernels:
        return tokens
    chunk = loss_chunk_tokens(np.asarray(tokens, dtype=np.int64), w.hidden_per_rank, w.vocab_rows)
    return np.where(w.tensor > 1, tokens, chunk)


def embedding_bytes(w: Workload) -> MovedBytes:
    """Lookup of tokens and positions; backward writes the gradient of a whole table."""
    e, t, h = w.element_bytes, w.tokens, w.hidden_per_rank
    masked = 2 * e * (w.tensor > 1)
    found = moved_by([2 * e, masked], [e, masked]).wide(t * h)
    found += moved_by([], [e]).wide(w.table_params)
    if w.shape.positions == "learned":
        # Ranks that split tokens look up a row for each; others one for all sequences, over which
        # its gradient is summed.
        own, splits = t * h / w.sequence_parallel, w.sequence_parallel > 1
        rows = np.where(splits, own, w.fixed.sequence_length / w.searched.context * h)
        found += moved_by([3 * e], [e * (1 - splits)]).wide(own)
        found += moved_by([2 * e], [e]).wide(rows)
        found += moved_by([], [e]).wide(w.shape.max_positions * h)
    if w.shape.embedding_norm:
        found += norm_bytes(w, False).wide(t * h / w.sequence_parallel)
    return found


def accumulated_bytes(w: Workload) -> Number:
    """Bytes of one microbatch's gradients, added to those before; of a table that embedding and
    head share, both gradients are added first.
    """
    e, g = w.element_bytes, w.gradient_element_bytes
    # Reduced after every microbatch, gradients are copied into a bucket; adding its shard to that
    # of the step is left out.
    each = e + (2 - _scattered(w)) * g
    if w.fixed.splits_backward:  # deferred GEMMs of weight gradients add to those before themselves
        deferred = 1.0 - (w.sequence_parallel > 1)
        tables = (w.has_embedding + w.has_head) * w.table_params * has_weight_gradients(w)
        return tables * each + (1 - deferred) * (w.param_counts.trained - tables) * each
    tied = w.has_embedding * w.has_head * w.table_params * w.shape.tied * has_weight_gradients(w)
    return w.param_counts.trained * each + tied * 3 * e


def optimizer_bytes(w: Workload, owned: Number) -> Number:
    """Bytes of what follows the microbatches: the gradient norm, clipping, the update, and zeroing
    the gradients of the next step.

    Args:
        w: Per-rank problem sizes.
        owned: Parameters whose optimizer states the rank holds.
    """
    e, g, wide = w.element_bytes, w.gradient_element_bytes, w.fixed.step_element_bytes
    master = w.fixed.master_bytes
    states = 2 * (w.fixed.moment_bytes + (master or e))
    if w.fixed.kernels == "fused":  # reads gradients in their dtype, writes weights and masters
        each = g + states + g + (e if master else 0)
    else:
        # Clipped in the dtype of the update, into which narrower gradients are copied first.
        copied = (g + wide) * (g < wide)
        each = g + copied + 2 * wide + states + wide + ((4 + e) if master else 0)
    scattered = _scattered(w)
    return owned * (each + scattered * g) + w.param_counts.trained * ((1 - scattered) * g)


def host_step_bytes(w: Workload, owned: Number) -> Number:
    """Bytes of host memory that the update of offloaded states moves. The norm is the device's. A
    loss scale is divided out of fp32 gradients in place; clipping, which few steps do, is left out.

    Args:
        w: Per-rank problem sizes.
        owned: Parameters whose optimizer states the rank holds.
    """
    stepped = w.fixed.master_bytes or w.element_bytes
    g = w.gradient_element_bytes
    unscaled = 2 * g * (w.fixed.precision == "fp16") * (g == stepped)
    moved: Number = stepped_bytes(g, w.fixed.moment_bytes, stepped, w.element_bytes)
    return owned * (moved + unscaled)


def _scattered(w: Workload) -> Number:
    """1 where gradients are reduce-scattered after every microbatch."""
    return w.reduce_microbatch if w.zero >= 2 else 0.0
