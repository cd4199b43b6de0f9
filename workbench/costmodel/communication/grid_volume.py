"""Communication volume of 2-D, 2.5-D and 3-D tensor parallelism.

For Y[M, N] = X[M, K] A[K, N] a rank receives, in elements: SUMMA (q-1)(MK/d + KN)/q^2 and 3-D
(l-1)(MK + KN + MN)/l^3 in forward, twice that in backward; 2.5-D adds 2(d-1)/d KN/q^2 once a step
(2104.05343, 2105.14500, 2105.14450).
"""

from __future__ import annotations

import numpy as np

from workbench.costmodel.communication.collective_call import CollectiveCall, shared_kv_head_calls
from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.layer_gemms import LayerGemm, head_gemm, layer_gemms
from workbench.costmodel.inputs.rank_workload import Workload

GridExchange = tuple[str, Number, Number]
"""(kind of collective, elements of the full tensor, calls)."""


def gemm_exchanges(w: Workload, p: LayerGemm, action: str) -> list[GridExchange]:
    """Collectives of one GEMM within a side of the tensor grid.

    Args:
        w: Per-rank problem sizes.
        p: The GEMM on this rank.
        action: F for the forward GEMM, B for the two of its backward.
    """
    g, n = w.tiling.gathered_blocks, w.tiling.num_steps
    x, weight, y = p.rows / g * p.inner, p.columns * p.inner / g, p.rows / g * p.columns
    calls, trained = p.count / n, float(w.fixed.adapter_rank == 0)
    if w.fixed.algorithm == "3d":
        if action == "F":
            return [
                ("all_gather", g * x, calls),
                ("all_gather", g * weight, calls),
                ("reduce_scatter", g * y, calls),
            ]
        weights = trained * calls
        return [
            ("all_gather", g * y, calls),
            ("all_gather", g * weight, calls),
            ("reduce_scatter", g * x, calls),
            ("all_gather", g * x, weights),
            ("all_gather", g * y, weights),
            ("reduce_scatter", g * weight, weights),
        ]
    if action == "F":
        return [("broadcast", x, n * calls), ("broadcast", weight, n * calls)]
    weights = trained * n * calls
    return [
        ("broadcast", weight, n * calls),
        ("reduce", x, n * calls),
        ("broadcast", x, weights),
        ("reduce", weight, weights),
    ]


def grid_collectives(w: Workload) -> list[CollectiveCall]:
    """All collectives of a step inside a tensor grid, except the loss's."""
    m, sparse = w.microbatches, w.layers - w.dense_layers
    parts = (
        [(p, m * w.dense_layers) for p in layer_gemms(w, False)]
        if (w.dense_layers > 0).any()
        else []
    )
    parts += [(p, m * sparse) for p in layer_gemms(w, True)] if w.shape.moe else []
    head = [(head_gemm(w), m * w.has_head)]
    again = w.recomputed_layers / np.maximum(w.layers, 1)
    return [
        *(
            _call(w, moved, times, "F")
            for p, times in parts + head
            for moved in gemm_exchanges(w, p, "F")
        ),
        *(
            _call(w, moved, times * again, "B")
            for p, times in parts
            for moved in gemm_exchanges(w, p, "F")
        ),
        *(
            _call(w, moved, times, "B")
            for p, times in parts + head
            for moved in gemm_exchanges(w, p, "B")
        ),
        *_embedding_calls(w),
        *_norm_calls(w),
        *shared_kv_head_calls(w),
    ]


def _call(w: Workload, moved: GridExchange, times: Number, action: str) -> CollectiveCall:
    kind, elements, calls = moved
    return CollectiveCall(
        "tensor",
        kind,
        w.tiling.hidden_parts,
        w.dtype,
        elements * w.element_bytes,
        times * calls,
        action,
    )


def _embedding_calls(w: Workload) -> list[CollectiveCall]:
    """Embedding lookup: a 2-D rank broadcasts table blocks of its column; a 3-D rank all-gathers
    its part of the table and looks tokens up for its neighbors too.
    """
    n, g, times = w.tiling.num_steps, w.tiling.gathered_blocks, w.microbatches * w.has_embedding
    table, tokens = g * w.vocab_rows * w.weight_in_dim, g * w.tokens * w.hidden_per_rank
    if w.fixed.algorithm != "3d":
        return [
            _call(w, (kind, table, n), times, action)
            for kind, action in (("broadcast", "F"), ("reduce", "B"))
        ]
    return [
        _call(w, ("all_gather", table, 1), times, "F"),
        _call(w, ("reduce_scatter", tokens, 1), times, "F"),
        _call(w, ("all_gather", tokens, 1), times, "B"),
        _call(w, ("reduce_scatter", table, 1), times, "B"),
    ]


def _norm_calls(w: Workload) -> list[CollectiveCall]:
    """Norms over a sharded hidden dim: fp32 statistics of every token.

    RMSNorm all-reduces one each way. LayerNorm all-gathers mean and deviation of the shards in
    forward, because summed partial moments lose precision, and all-reduces two in backward.
    """
    times = w.microbatches * (2 * w.layers + w.has_head + w.has_embedding * w.shape.embedding_norm)
    again = 2 * w.microbatches * w.recomputed_layers
    q, size = w.tiling.hidden_parts, 4 * w.tokens
    if w.shape.norm == "layernorm":
        forward, backward = ("all_gather", 2 * q * size), ("all_reduce", 2 * size)
    else:
        forward = backward = ("all_reduce", size)
    each = ((forward, times, "F"), (forward, again, "B"), (backward, times, "B"))
    return [
        CollectiveCall("tensor", kind, q, "fp32", size, count, action)
        for (kind, size), count, action in each
    ]
