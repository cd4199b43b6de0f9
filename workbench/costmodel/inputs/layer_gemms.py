"""GEMMs of one layer and of the head on one rank: their sizes and FLOPs, whatever runs them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload


@dataclass(frozen=True)
class LayerGemm:
    """`count` GEMMs [rows, inner] x [inner, columns]."""

    rows: Number
    columns: Number
    inner: Number
    count: Number = 1.0
    ungrouped: bool = True
    """Whether it is a GEMM of its own, not one of a grouped GEMM over experts."""
    upcast: bool = False
    """Whether it runs in fp32 whatever the plan's precision, as a router may."""

    @property
    def flops(self) -> Number:
        """FLOPs of all `count` GEMMs, multiplications and additions."""
        return 2 * self.count * self.rows * self.columns * self.inner


def layer_gemms(w: Workload, is_moe: bool) -> list[LayerGemm]:
    """List the GEMMs of one layer's forward on a rank.

    Args:
        w: Per-rank problem sizes.
        is_moe: Whether the feed-forward is an MoE; its experts are a grouped GEMM.

    Returns:
        One entry per projection, or per tile of it; q, k and v (and gate and up) are one GEMM
        where the framework fuses them. MLA has its down- and up-projections.
    """
    gemms, tiles = _untiled_gemms(w, is_moe), w.fixed.tile_factor
    if tiles == 1:
        return gemms
    return [replace(gemm, columns=gemm.columns / tiles) for gemm in gemms for _ in range(tiles)]


def _untiled_gemms(w: Workload, is_moe: bool) -> list[LayerGemm]:
    h, t, n = w.hidden_per_rank, w.tokens * w.tiling.gathered_blocks, w.tiling.num_steps
    mla = w.shape.mla
    if mla is None and w.fixed.framework.kernels.fused_qkv:
        into = [LayerGemm(t, w.q_width + w.k_width + w.v_width, h, n)]
    elif mla is None:
        into = [
            LayerGemm(t, w.q_width, h, n),
            LayerGemm(t, w.k_width, h, n),
            LayerGemm(t, w.v_width, h, n),
        ]
    else:
        part = w.tiling.hidden_parts
        q_rank, kv_rank = (mla.q_rank or 0) / part, mla.kv_rank / part
        query = [(q_rank, h), (w.q_width, q_rank)] if mla.q_rank else [(w.q_width, h)]
        up = w.heads * (mla.nope_dim + mla.value_dim)
        widths = [*query, (kv_rank + mla.rope_dim / part, h), (up, kv_rank)]
        into = [LayerGemm(t, columns, inner, n) for columns, inner in widths]
    return [*into, LayerGemm(t, h, w.o_width, n), *_feed_forward_gemms(w, is_moe)]


def _feed_forward_gemms(w: Workload, is_moe: bool) -> list[LayerGemm]:
    h, t, n = w.hidden_per_rank, w.tokens * w.tiling.gathered_blocks, w.tiling.num_steps
    moe, wide, joined = w.shape.moe, 2 if w.shape.gated else 1, 1
    if w.fixed.framework.kernels.fused_qkv:
        wide, joined = 1, wide
    if not is_moe or moe is None:
        return [LayerGemm(t, joined * w.ffn, h, n)] * wide + [LayerGemm(t, h, w.ffn, n)]
    width, own = w.expert_ffn, moe.experts / w.searched.expert
    routed = t * w.routed_rows_per_token / own
    result = [
        LayerGemm(
            t,
            moe.experts / w.tiling.hidden_parts,
            h,
            n,
            upcast=w.fixed.framework.experts.fp32_router,
        ),
        *[LayerGemm(routed, joined * width, h, n * own, False)] * wide,
    ]
    result.append(LayerGemm(routed, h, width, n * own, False))
    if moe.shared:
        result += [
            *[LayerGemm(t, joined * w.shared_ffn, h, n)] * wide,
            LayerGemm(t, h, w.shared_ffn, n),
        ]
    return result


def layer_flops(w: Workload, is_moe: bool) -> Number:
    """Forward FLOPs of one layer's GEMMs and one microbatch on a rank; attention's scores are
    apart.
    """
    return sum(p.flops for p in layer_gemms(w, is_moe))


def column_parallel_share(w: Workload) -> Number:
    """Share of a dense layer's FLOPs in GEMMs that tensor parallelism shards by outputs."""
    by_rows = 2 * w.tokens * w.hidden_per_rank * (w.o_width + w.ffn)
    return 1 - by_rows / layer_flops(w, False)


def head_flops(w: Workload) -> Number:
    """Forward FLOPs of the output projection on a rank."""
    return head_gemm(w).flops


def head_gemm(w: Workload) -> LayerGemm:
    """GEMM of the output projection onto the vocabulary."""
    return LayerGemm(
        w.tokens * w.tiling.gathered_blocks, w.vocab_rows, w.hidden_per_rank, w.tiling.num_steps
    )


def prediction_gemm(w: Workload) -> LayerGemm:
    """GEMM of a layer that predicts a further token: its projection of the hidden state and the
    next token's embedding (2412.19437, 2.2).
    """
    h = w.hidden_per_rank
    return LayerGemm(w.tokens * w.tiling.gathered_blocks, h / w.tiling.column_parts, 2 * h)


def attention_flops(w: Workload) -> Number:
    """Forward FLOPs of causal attention in one layer: QK^T and PV, the lower triangle only.

    A full score matrix takes 4 S^2 width FLOPs per sequence; the causal half of it is 2. A sliding
    window bounds the keys that a query attends to; where only some layers have it, every layer
    counts as their mean.
    """
    seen = w.shape.attended_keys(w.fixed.sequence_length)
    keys = w.k_width if w.shape.mla else w.q_width
    return w.tokens * seen * keys + w.tokens * seen * w.attended_width
