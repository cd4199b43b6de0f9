"""Operator strategies for a model of any shape."""

from __future__ import annotations

import math
import random

from workbench.plan.model.model_shape import Shape
from workbench.plan.operators.operator_sites import SUMS, Site
from workbench.plan.operators.strategy_form import strategy_text


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


def sequence_parallel(shape: Shape, ranks: int) -> dict[str, str]:
    """The same with activations between them split by tokens (2205.05198)."""
    row = f"((1,1,{ranks}),({ranks},1),(1,{ranks},1))"
    norm = f"((1,{ranks},1),(1,))"
    found = columns_before_rows(shape, ranks)
    found |= {name: row for name in found if name.endswith((".o", ".down"))}
    found |= {"blocks.*.*_norm": norm, "final_norm": norm}
    return found | {"embedding.tokens": f"(({ranks},1),(1,1),(1,{ranks},1))"}


def sequences(shape: Shape, ranks: int) -> dict[str, str]:
    """Every GEMM and norm of the blocks by sequence, so that weights are replicated."""
    product = f"(({ranks},1),(1,1))"
    found = {"blocks.*.*_norm": f"(({ranks},1),(1,))", "blocks.*.attention.[qkvo]": product}
    if _has_dense(shape):
        found |= {f"blocks.*.mlp.{name}": product for name in (*_wide(shape), "down")}
    return found | ({} if shape.moe is None else {"blocks.*.mlp": f"(({ranks},),(1,))"})


def drawn_form(rng: random.Random, site: Site, ranks: int) -> str:
    """Any pieces of any dimension that are legal, and any output."""
    dims = list(dict.fromkeys(d for part in site.dims for d in part))
    pieces, left = dict.fromkeys(dims, 1), ranks
    for dim in rng.sample(dims, len(dims)):
        legal = [n for n in (1, 2, 4, 8) if left % n == 0 and site.units.get(dim, 1) % n == 0]
        pieces[dim] = rng.choice(legal)
        left //= pieces[dim]
    form = tuple(tuple(pieces[d] for d in part) for part in site.dims)
    if site.scatters and rng.random() < 0.5:
        names, summed = SUMS[site.kind]
        output = pieces | {"tokens": pieces["tokens"] * pieces[summed]}
        form = (*form, tuple(output[d] for d in names))
    return strategy_text(form)


def _wide(shape: Shape) -> tuple[str, ...]:
    return ("gate", "up") if shape.gated else ("up",)


def _has_dense(shape: Shape) -> bool:
    return shape.moe is None or shape.moe.first_dense > 0
