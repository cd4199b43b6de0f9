"""Legality of `finetune.quantize`: groups of columns that divide every linear layer of the blocks,
and every rank's part of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.errors import Problem
from workbench.plan.model.block_linears import block_linears
from workbench.plan.model.head_split import padded_heads_per_rank
from workbench.plan.model.model_shape import Shape
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import NARROW
from workbench.runtime_facts.four_bit_sizes import GROUPS

FIELD = "finetune.quantize"


def problems(plan: ResolvedPlan) -> list[Problem]:
    """Why a complete plan's base cannot be stored in 4 bits; empty if it can, or is not to be."""
    if plan.finetune is None or plan.finetune.quantize is None or plan.lora is None:
        return []  # without adapters it is illegal: `finetune_rules`
    quantize = plan.finetune.quantize
    if beside := _beside(plan):
        return [Problem(FIELD, f"is {quantize.format}, {beside}")]
    return list(_groups(plan, quantize.group))


def rank_columns(shape: Shape, tensor_ranks: int = 1) -> dict[str, int]:
    """Linear layer, by name in its block -> columns of a rank's part of its weight, padding
    included: what its groups divide.

    Args:
        shape: The model.
        tensor_ranks: Ranks that the tensor axis shards row-parallel layers over.
    """
    found = {}
    for layer in range(shape.layers):
        for name, size in block_linears(shape, layer).items():
            columns = size.inputs
            if name == "attention.o":
                heads, _ = padded_heads_per_rank(shape, tensor_ranks)
                columns = columns // shape.heads * heads
            elif name.endswith(".down"):
                columns = -(-columns // tensor_ranks)
            found[name] = columns
    return found


def _groups(plan: ResolvedPlan, group: int) -> Iterator[Problem]:
    ranks = plan.strategy.tensor.ranks
    lengths = rank_columns(plan.shape, ranks)
    left = [f"{name} = {length}" for name, length in lengths.items() if length % group]
    if not left:
        return
    fitting = [n for n in GROUPS if not any(length % n for length in lengths.values())]
    over = f" over {ranks} tensor ranks" if ranks > 1 else ""
    legal = " or ".join(map(str, fitting)) or f"{FIELD}: null"
    yield Problem(
        f"{FIELD}.group",
        f"is {group}, which does not divide the columns of every linear layer{over} "
        f"({', '.join(left)}); legal: {legal}",
    )


def _beside(plan: ResolvedPlan) -> str | None:
    """What the plan has beside which no base is stored in 4 bits, and what is legal."""
    s = plan.strategy
    cases = (
        (bool(plan.code), "but the model is code", "a model by its shape"),
        (bool(plan.profiled), "but a layer profile has no linears", "a model by its shape"),
        (
            s.precision in NARROW,
            f"but strategy.precision {s.precision} casts weights of 16 bits",
            "precision: bf16, fp16 or fp32",
        ),
        (
            bool(s.operators),
            "but strategy.operators divide weights as they are used",
            "no operators",
        ),
        (
            s.tensor.ranks > 1 and s.tensor.algorithm != "1d",
            f"but a grid of {s.tensor.algorithm} moves parts of weights",
            "tensor.algorithm: 1d",
        ),
    )
    found = [f"{why}; legal: null, or {legal}" for is_so, why, legal in cases if is_so]
    return found[0] if found else None
