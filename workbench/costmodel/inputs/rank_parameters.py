"""Parameter counts of each pipeline rank before ZeRO shards them: dense, experts and adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from workbench.costmodel.inputs.adapted_layers import (
    adapter_counts,
    layer_adapter_counts,
    packed_difference,
)
from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.operator_stages import rank_parameters
from workbench.costmodel.inputs.rank_shapes import RankShapes
from workbench.plan.model.parameter_count import (
    BlockWidths,
    attention_parameters,
    block_norms,
    feed_forward_parameters,
    head_norms,
    norm,
    prediction,
)


@dataclass(frozen=True)
class ParamCounts:
    """Parameters of one rank, by pipeline rank.

    Experts are counted apart, because expert parallelism replicates them on fewer ranks than the
    dense parameters.
    """

    dense: Array
    experts: Array
    layer: Number
    """Parameters of one layer: the unit that ZeRO-3 all-gathers."""
    adapters: Array
    """Parameters of LoRA adapters, replicated as the dense ones are."""
    expert_adapters: Array
    """Those of experts, replicated as these are."""
    trained_layer: Number
    """Parameters with gradients of one layer."""
    frozen: bool = False
    """Whether adapters alone have gradients."""

    @property
    def total(self) -> Array:
        """All parameters."""
        return self.dense + self.experts + self.adapters + self.expert_adapters

    @property
    def trained_dense(self) -> Array:
        """Parameters with gradients and optimizer states, but experts': of adapters where there are
        any.
        """
        return self.adapters if self.frozen else self.dense

    @property
    def trained_experts(self) -> Array:
        """The same of experts."""
        return self.expert_adapters if self.frozen else self.experts

    @property
    def trained(self) -> Array:
        """The same of both."""
        return self.trained_dense + self.trained_experts


def count_params(w: RankShapes) -> ParamCounts:
    """Count the parameters of each pipeline rank before data parallelism shards them."""
    if w.fixed.grid is not None:
        return params_on_shapes(w)
    shape = w.shape
    widths = _block_widths(w)
    norms: Number = block_norms(shape)
    if shape.qk_norm == "width":  # sharded as heads are
        norms = norms - head_norms(shape) + w.q_width + w.k_width
    layer = attention_parameters(shape, widths) + norms * w.tiling.vector_share
    mlp = feed_forward_parameters(shape, widths, w.ffn)
    sparse = w.layers - w.dense_layers
    moe = shape.moe
    expert = feed_forward_parameters(shape, widths, w.expert_ffn) if moe else 0.0
    shared = 0.0
    if moe and moe.shared:
        shared = feed_forward_parameters(shape, widths, w.shared_ffn)
    router: Number = 0.0
    if moe:
        bias = moe.score_bias * moe.experts * w.tiling.vector_share
        router = w.weight_in_dim * moe.experts / w.tiling.hidden_parts + bias + shared
    dense = w.layers * layer + w.dense_layers * mlp + sparse * router + _ends(w)
    experts = sparse * (moe.experts / w.searched.expert * expert if moe else 0.0)
    unit = layer + (mlp if moe is None else router + moe.experts / w.searched.expert * expert)
    if not w.fixed.adapter_rank:
        return ParamCounts(dense, experts, unit, w.zeros, w.zeros, unit)
    own, of_experts = adapter_counts(w)
    less, _ = packed_difference(w, False)
    dense = dense + w.dense_layers * less
    if moe is None:
        unit = unit + less
    else:
        less, of_each = packed_difference(w, True)
        dense, experts = dense + sparse * less, experts + sparse * of_each
        unit = unit + less + of_each
    most = layer_adapter_counts(w)
    return ParamCounts(dense, experts, unit + most, own, of_experts, most, frozen=True)


def params_on_shapes(w: RankShapes, size: Callable[[int], int] = int) -> ParamCounts:
    """Parameters of ranks whose microbatch runs on shapes, where one of so many elements has
    `size` of them; the largest layer is the unit.
    """
    dense, experts, largest = [], [], []
    for place in w.places:
        by_unit: Counter[str] = Counter()
        own = list(rank_parameters(w.fixed, place.stage))
        for p in own:
            by_unit[p.unit] += size(p.elements)
        experts.append(float(sum(size(p.elements) for p in own if p.is_of_experts)))
        dense.append(by_unit.total() - experts[-1])
        largest.append(float(max((n for u, n in by_unit.items() if u.isdigit()), default=0)))
    unit = np.array(largest)
    return ParamCounts(np.array(dense), np.array(experts), unit, w.zeros, w.zeros, unit)


def _block_widths(w: RankShapes) -> BlockWidths:
    """Widths of a tensor rank: q, k and v are column-parallel, the output projection is
    row-parallel and its bias is replicated (1909.08053).
    """
    return BlockWidths(
        q=w.q_width,
        k=w.k_width,
        v=w.v_width,
        o=w.o_width,
        heads=w.heads,
        weight_in_dim=w.weight_in_dim,
        hidden=w.hidden_per_rank,
        hidden_parts=w.tiling.hidden_parts,
        in_dim_share=w.tiling.in_dim_share,
    )


def _ends(w: RankShapes) -> Array:
    shape, table, part = w.shape, w.vocab_rows * w.weight_in_dim, w.tiling.vector_share
    positions = part * shape.max_positions * shape.hidden if shape.positions == "learned" else 0
    head = table * (1.0 - w.has_embedding * float(shape.tied))
    if shape.mtp_layers:
        # Embeddings of further tokens are looked up on the last stage, which has a table of its own
        # for them (Megatron-core's multi_token_prediction.py).
        own = prediction(shape, w.weight_in_dim, w.hidden_per_rank / w.tiling.column_parts)
        head = head + shape.mtp_layers * own + table * (1.0 - w.has_embedding)
    first = w.has_embedding * (
        table + positions + part * shape.embedding_norm * norm(shape, shape.hidden)
    )
    return np.asarray(first + w.has_head * (head + part * norm(shape, shape.hidden)))
