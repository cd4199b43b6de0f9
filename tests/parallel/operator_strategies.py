"""Operator strategies for a model of any shape."""

from __future__ import annotations

import math

from workbench.plan.model.model_shape import Shape


def columns_before_rows(shape: Shape, ranks: int) -> dict[str, str]:
    """Megatron-LM's pairs (1909.08053); what the ranks do not divide stays replicated."""
    column, row = f"((1,1),(1,{ranks}))", f"((1,{ranks}),({ranks},1))"
    found = {"embedding.tokens": f"(({ranks},1),(1,))", "head": column}
    if math.gcd(shape.heads, int(shape.kv_heads or shape.heads)) % ranks == 0:
        found |= {"blocks.*.attention.[qkv]": column, "blocks.*.attention.o": row}
    if _has_dense(shape) and shape.ffn % ranks == 0:
        found |= {f"blocks.*.mlp.{name}": column for name in _wide(shape)}
        found |= {"blocks.*.mlp.down": row}
    return found | ({} if shape.moe is None else {"blocks.*.mlp": f"((1,),({ranks},))"})


def sequences(shape: Shape, ranks: int) -> dict[str, str]:
    """Every GEMM and norm of the blocks by sequence, so that weights are replicated."""
    product = f"(({ranks},1),(1,1))"
    found = {"blocks.*.*_norm": f"(({ranks},1),(1,))", "blocks.*.attention.[qkvo]": product}
    if _has_dense(shape):
        found |= {f"blocks.*.mlp.{name}": product for name in (*_wide(shape), "down")}
    return found | ({} if shape.moe is None else {"blocks.*.mlp": f"(({ranks},),(1,))"})


def _wide(shape: Shape) -> tuple[str, ...]:
    return ("gate", "up") if shape.gated else ("up",)


def _has_dense(shape: Shape) -> bool:
    return shape.moe is None or shape.moe.first_dense > 0
