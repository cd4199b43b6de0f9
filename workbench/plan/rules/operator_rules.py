"""Whether operator strategies can run: on a model of ours, by its shape alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

from workbench.errors import PlanError, Problem
from workbench.plan.model.model_shape import Shape
from workbench.plan.operators.operator_sites import Site, matched
from workbench.plan.operators.strategy_form import (
    Placement,
    read_strategies,
    strategy_grid,
    strategy_text,
)
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

WORD = 128
"""Vocabularies are padded so that they can be split (1909.08053): any number of pieces up to it."""


def problems(plan: ResolvedPlan) -> list[Problem]:
    """Why a complete plan's operator strategies cannot run; empty if they can, or there are
    none.
    """
    if not plan.strategy.operators:
        return []
    try:
        if plan.code:  # its modules are known only where it is built
            read_strategies(plan.strategy.operators)
            return []
        return [*_beside(plan), *_fitting(plan)]
    except PlanError as error:
        return error.problems


def sides(plan: Plan) -> tuple[int, ...]:
    """Sides of the grid that the tensor ranks are to the operators, outermost first; () where the
    plan has none.
    """
    ranks, operators = plan.strategy.tensor.ranks, plan.strategy.operators
    return (
        strategy_grid(ranks, read_strategies(operators).values()) if operators and ranks > 1 else ()
    )


def placements(plan: ResolvedPlan) -> dict[str, Placement]:
    """Module -> where its strategy lies on the grid, for all modules that the plan's operators
    name.
    """
    ranks, shape = plan.strategy.tensor.ranks, sides(plan)
    found = matched(
        plan.strategy.operators, sites(plan.shape, plan.training.micro_batch, ranks), ranks
    )
    return {name: site.placement(form, shape) for name, (site, form) in found.items()}


def sites(shape: Shape, sequences: int, ranks: int) -> dict[str, Site]:
    """Modules of a model of ours that a strategy may name. `sequences` of a microbatch are never
    cut through.
    """
    groups, rows = math.gcd(shape.heads, int(shape.kv_heads or shape.heads)), {"rows": sequences}
    padded = -(-shape.vocab // (WORD * ranks)) * WORD * ranks
    table = Site("Embedding", rows | {"vocabulary": padded, "hidden": shape.hidden})
    norm = Site("Norm", rows)

    def product(inner: int, columns: int) -> Site:
        return Site("MatMul", rows | {"inner": inner, "columns": columns})

    found = {"embedding.tokens": table} | ({"embedding.norm": norm} if shape.embedding_norm else {})
    for i in range(shape.layers):
        block = {"attention_norm": norm, "mlp_norm": norm}
        block |= {f"attention.{name}": product(shape.hidden, groups) for name in "qkv"}
        block["attention.attend"] = Site("FlashAttention", rows | {"heads": groups})
        block["attention.o"] = product(groups, shape.hidden)
        block |= {
            f"mlp.{name}": product(shape.hidden, shape.ffn)
            for name in (("gate", "up") if shape.gated else ("up",))
        }
        kind = "GatedActivation" if shape.gated else "Activation"
        block |= {
            "mlp.activate": Site(kind, rows | {"width": shape.ffn}),
            "mlp.down": product(shape.ffn, shape.hidden),
        }
        found |= {f"blocks.{i}.{name}": site for name, site in block.items()}
    loss = Site("CrossEntropy", rows | {"vocabulary": padded})
    return found | {"final_norm": norm, "head": product(shape.hidden, padded), "head.loss": loss}


def _beside(plan: ResolvedPlan) -> Iterator[Problem]:
    """Other choices that exclude operator strategies."""
    s = plan.strategy
    needs = (
        ("strategy.tensor.algorithm", s.tensor.algorithm, "1d"),
        ("strategy.tensor.sequence", s.tensor.sequence, False),
        ("strategy.context.size", s.context.size, 1),
        ("strategy.recompute", s.recompute if s.recompute != [] else "none", "none"),
        ("model.moe", "set" if plan.shape.moe else None, None),
    )
    for field, value, legal in needs:
        if value != legal:
            yield Problem(
                field,
                f"is {value!r}, but strategy.operators says how each operator is split; legal: "
                f"{legal}",
            )


def _fitting(plan: ResolvedPlan) -> Iterator[Problem]:
    ranks = plan.strategy.tensor.ranks
    found = matched(
        plan.strategy.operators, sites(plan.shape, plan.training.micro_batch, ranks), ranks
    )
    pieces = {name: site.pieces(form) for name, (site, form) in found.items()}
    yield from _loss(plan, pieces, sides(plan))
    if plan.shape.tied:
        yield from _tied(pieces)


def _loss(
    plan: ResolvedPlan, pieces: dict[str, dict[str, int]], shape: tuple[int, ...]
) -> Iterator[Problem]:
    """The loss adds up over one axis of the grid, or over all of them; only even pieces of logits
    are redistributed.
    """
    head = pieces.get("head", {})
    own = {"rows": head.get("rows", 1), "vocabulary": head.get("columns", 1)}
    vocabulary = pieces.get("head.loss", own)["vocabulary"]
    uneven = [n for n in (own["vocabulary"], vocabulary) if plan.shape.vocab % n]
    if pieces.get("head.loss", own) != own and uneven:
        legal = strategy_text(((own["rows"], own["vocabulary"]), (own["rows"],)))
        yield Problem(
            "strategy.operators.head.loss",
            f"differs from the head's, and {uneven[0]} pieces do not divide "
            f"vocab = {plan.shape.vocab}; legal: {legal}",
        )
    if vocabulary not in (1, *shape, plan.strategy.tensor.ranks):
        ways = ", ".join(map(str, sorted({1, *shape, plan.strategy.tensor.ranks})))
        field = (
            "strategy.operators.head.loss" if "head.loss" in pieces else "strategy.operators.head"
        )
        yield Problem(field, f"splits the vocabulary {vocabulary} ways; legal: {ways}")


def _tied(pieces: dict[str, dict[str, int]]) -> Iterator[Problem]:
    """The head shares the embedding's weight, so both must cut it alike."""
    table = pieces.get("embedding.tokens", {})
    head = pieces.get("head", {})
    same = [
        table.get(a, 1) == head.get(b, 1)
        for a, b in (("rows", "rows"), ("vocabulary", "columns"), ("hidden", "inner"))
    ]
    if not all(same) or table.get("hidden", 1) > 1:
        rows, vocabulary = table.get("rows", 1), table.get("vocabulary", 1)
        legal = (
            f"(({rows},1),(1,{vocabulary})) for the head, and an embedding whose width stays whole"
        )
        what = "cuts the weight that it shares with embedding.tokens in another way"
        yield Problem("strategy.operators.head", f"{what}; legal: {legal}")
