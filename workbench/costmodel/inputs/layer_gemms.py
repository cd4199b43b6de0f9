"""GEMMs of one layer and of the head on one rank: their sizes and FLOPs, whatever runs them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.plan.model.model_shape import Mla


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
    names: tuple[str, ...] = ()
    """Names in the block of the linear layers that it computes."""

    @property
    def flops(self) -> Number:
        """FLOPs of all `count` GEMMs, multiplications and additions."""
        return 2 * self.count * self.rows * self.columns * self.inner

    @property
    def input_gradient(self) -> LayerGemm:
        """The GEMM of the gradient of its input."""
        return replace(self, columns=self.inner, inner=self.columns)

    @property
    def weight_gradient(self) -> LayerGemm:
        """The GEMM of the gradient of its weight."""
        return replace(self, rows=self.columns, columns=self.inner, inner=self.rows)


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
    into = [
        LayerGemm(t, columns, inner, n, names=names)
        for columns, inner, names in (_attention_inputs(w) if mla is None else _latents(w, mla))
    ]
    out = LayerGemm(t, h, w.o_width, n, names=("attention.o",))
    return [*into, out, *_feed_forward_gemms(w, is_moe)]


Widths = tuple[Number, Number, tuple[str, ...]]
"""Columns and inner dim of a GEMM, and the names of the linear layers that it computes."""


def _attention_inputs(w: Workload) -> list[Widths]:
    h, names = w.hidden_per_rank, ("attention.q", "attention.k", "attention.v")
    if w.fixed.framework.kernels.fused_qkv:
        return [(w.q_width + w.k_width + w.v_width, h, names)]
    return [(width, h, (name,)) for width, name in zip((w.q_width, w.k_width, w.v_width), names)]


def _latents(w: Workload, mla: Mla) -> list[Widths]:
    h, part = w.hidden_per_rank, w.tiling.hidden_parts
    q_rank, kv_rank = (mla.q_rank or 0) / part, mla.kv_rank / part
    up = w.heads * (mla.nope_dim + mla.value_dim)
    down: list[Widths] = [(q_rank, h, ("attention.q_down",))] if mla.q_rank else []
    return [
        *down,
        (w.q_width, q_rank if mla.q_rank else h, ("attention.q",)),
        (kv_rank + mla.rope_dim / part, h, ("attention.kv_down",)),
        (up, kv_rank, ("attention.kv_up",)),
    ]


def _feed_forward_gemms(w: Workload, is_moe: bool) -> list[LayerGemm]:
    t, n, moe = w.tokens * w.tiling.gathered_blocks, w.tiling.num_steps, w.shape.moe
    if not is_moe or moe is None:
        return _mlp_gemms(w, "mlp.", w.ffn, t, n)
    own = moe.experts / w.searched.expert
    router = LayerGemm(
        t,
        moe.experts / w.tiling.hidden_parts,
        w.hidden_per_rank,
        n,
        upcast=w.fixed.framework.experts.fp32_router,
        names=("mlp.router",),
    )
    rows = t * w.routed_rows_per_token / own
    routed = _mlp_gemms(w, "mlp.experts.", w.expert_ffn, rows, n * own, ungrouped=False)
    shared = _mlp_gemms(w, "mlp.shared.", w.shared_ffn, t, n) if moe.shared else []
    return [router, *routed, *shared]


def _mlp_gemms(
    w: Workload, part: str, width: Number, rows: Number, count: Number, ungrouped: bool = True
) -> list[LayerGemm]:
    """Gate and up, joined where the framework fuses them, and down."""
    h, names = w.hidden_per_rank, (f"{part}gate", f"{part}up") if w.shape.gated else (f"{part}up",)
    joined = [names] if w.fixed.framework.kernels.fused_qkv else [(name,) for name in names]
    return [
        *(LayerGemm(rows, len(x) * width, h, count, ungrouped, names=x) for x in joined),
        LayerGemm(rows, h, width, count, ungrouped, names=(f"{part}down",)),
    ]


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
