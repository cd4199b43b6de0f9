"""Attention as operators, by sequence and head: three with the square of scores between, or one
that keeps none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from workbench.plan.model.model_shape import Shape
from workbench.plan.operators.operator_graph import Operator, OperatorDim, OperatorTensor


def attention_operators(
    shape: Shape, sequences: int, length: int, fused: bool
) -> tuple[Operator, ...]:
    """Scores, softmax and context, or one fused operator (FlashAttention, arXiv:2205.14135)."""
    kv_heads = int(shape.kv_heads or shape.heads)
    groups, share = math.gcd(shape.heads, kv_heads), kv_heads / shape.heads
    dims = (
        OperatorDim("rows", sequences, sequences),
        OperatorDim("heads", shape.heads, groups),
        OperatorDim("query", length),
        OperatorDim("key", length),
        OperatorDim("depth", shape.q_width // shape.heads),
    )
    q = OperatorTensor("query", ("rows", "heads", "query", "depth"))
    k = OperatorTensor("key", ("rows", "heads", "depth", "key"), share=share)
    v = OperatorTensor("value", ("rows", "heads", "key", "depth"), share=share)
    context = OperatorTensor("context", ("rows", "heads", "query", "depth"))
    # Of scores, and again of context: the causal half of a sequence, or of its sliding window.
    seen = shape.attended_keys(length)
    flops = float(sequences * length * seen * shape.q_width)
    name = "attention.attend"
    if fused:
        return (
            Operator(
                name,
                "FlashAttention",
                dims,
                (q, k, v),
                context,
                causal_flops=2 * flops,
                modules=(f"blocks.*.{name}",),
            ),
        )
    scores, probabilities = (
        OperatorTensor(t, ("rows", "heads", "query", "key")) for t in ("scores", "probabilities")
    )
    parts = (
        Operator(f"{name}.scores", "BatchMatMul", dims, (q, k), scores, causal_flops=flops),
        Operator(f"{name}.softmax", "Softmax", dims[:4], (scores,), probabilities),
        Operator(
            f"{name}.context", "BatchMatMul", dims, (probabilities, v), context, causal_flops=flops
        ),
    )
    return tuple(replace(part, modules=(f"blocks.*.{part.name}",)) for part in parts)


def attention_edges(block: Sequence[Operator]) -> list[tuple[str, str, int]]:
    """What passes from the projection through attention to the output projection: (from, to, which
    input).
    """
    inside = [op.name for op in block if op.name.startswith("attention.attend")]
    if len(inside) == 1:
        return [*(("attention.qkv", inside[0], i) for i in range(3)), (inside[0], "attention.o", 0)]
    scores, softmax, context = inside
    return [
        ("attention.qkv", scores, 0),
        ("attention.qkv", scores, 1),
        ("attention.qkv", context, 1),
        (scores, softmax, 0),
        (softmax, context, 0),
        (context, "attention.o", 0),
    ]
