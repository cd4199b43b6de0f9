"""Legality of `data.tile_factor`: linears computed tile by tile (2104.07857, section 5.1.3)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from workbench.errors import Problem
from workbench.plan.model.model_shape import Shape
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules import legal_sizes
from workbench.plan.schema import NARROW

FIELD = "strategy.data.tile_factor"
BESIDE = {"zero": 3, "keep_gathered": False, "pipeline": 1, "tensor": 1}
"""What a search varies too, and its only value beside which linears are computed by tiles."""


def linear_widths(shape: Shape) -> dict[str, int]:
    """Name -> outputs of a layer's linears, which tiles divide."""
    named = {"q": shape.q_width, "k and v": shape.kv_width, "hidden": shape.hidden}
    return named | {"ffn": shape.ffn}


def problems(plan: ResolvedPlan) -> Iterator[Problem]:
    """Why the field is not legal for the rest of the plan."""
    factor = plan.strategy.data.tile_factor
    if factor == 1:
        return
    if beside := _beside(plan):
        yield Problem(FIELD, f"is {factor}, {beside}")
        return
    widths = linear_widths(plan.shape)
    if left := [f"{name} = {width}" for name, width in widths.items() if width % factor]:
        legal = legal_sizes.near(factor, legal_sizes.divisors(math.gcd(*widths.values())))
        yield Problem(
            FIELD,
            f"is {factor}, which does not divide the outputs of every linear of a layer "
            f"({', '.join(left)}); legal: {legal}",
        )


def _beside(plan: ResolvedPlan) -> str | None:
    """What the plan has beside which no linear is computed by tiles, and what is legal."""
    s = plan.strategy
    data, tensor, pipeline = s.data, s.tensor.ranks, plan.sizes["pipeline"]
    cases = (
        (
            s.stack != "workbench",
            f"but stack is {s.stack}, whose tiling is not known",
            "stack: workbench",
        ),
        (
            data.zero != BESIDE["zero"],
            f"which needs data.zero 3; zero is {data.zero}",
            "data.zero: 3",
        ),
        (
            data.keep_gathered != BESIDE["keep_gathered"],
            "but data.keep_gathered is true: all tiles stay",
            "keep_gathered: false",
        ),
        (
            pipeline != BESIDE["pipeline"],
            f"but pipeline.size is {pipeline}: each stage stays gathered",
            "pipeline.size: 1",
        ),
        (
            tensor != BESIDE["tensor"],
            f"but {tensor} tensor ranks divide each linear already",
            "tensor.size: 1",
        ),
        (bool(s.operators), "but strategy.operators divide linears already", "no operators"),
        (bool(plan.code), "but the model is code", "a model by its shape"),
        (bool(plan.profiled), "but a layer profile has no linears", "a model by its shape"),
        (
            s.precision in NARROW,
            f"but {s.precision} scales a weight as one tensor",
            "precision: bf16 or fp16",
        ),
        (plan.lora is not None, "but finetune.lora adds to each linear", "finetune.method: full"),
    )
    found = [f"{why}; legal: 1, or {legal}" for is_so, why, legal in cases if is_so]
    if not found and (plan.shape.moe or plan.shape.mla or plan.shape.mtp_layers):
        found = [
            f"but {plan.shape.name} has experts, MLA or MTP; legal: 1, or a model without them"
        ]
    return found[0] if found else None
