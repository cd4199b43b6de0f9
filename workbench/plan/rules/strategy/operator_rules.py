"""Whether operator strategies can run: on a model of ours, by its shape alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from workbench.errors import PlanError, Problem
from workbench.plan.model.model_shape import Shape
from workbench.plan.operators.operator_sites import OUTPUT, Site, followed_by_positions, matched
from workbench.plan.operators.strategy_form import (
    Form,
    Placement,
    are_neighbors,
    read_strategies,
    strategy_grid,
    strategy_text,
)
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.legal_sizes import divisors, near
from workbench.plan.schema import Plan
from workbench.plan.stage_replicas import even_parts

_SHARED = (
    (("rows", "tokens"), ("rows", "tokens")),
    (("vocabulary",), ("columns",)),
    (("hidden",), ("inner",)),
)
"""Dims of the embedding and of a head that shares its weight, over whose axes both are split."""
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
    name; and module + `OUTPUT` -> where its output does, if its sum is scattered by tokens.
    """
    shape, found = sides(plan), {}
    for name, (site, form) in _named(plan).items():
        found[name] = site.placement(form, shape)
        output = site.output_placement(form, shape)
        if output is not None:
            found[name + OUTPUT] = output
    learned = plan.shape.positions == "learned"
    return found | (followed_by_positions(found) if learned else {})


def boundary_axes(plan: ResolvedPlan) -> tuple[int, ...]:
    """`axes_between` of a plan's stages. Where stages have replicas that share microbatches, every
    rank sends all tokens.
    """
    pipeline = plan.strategy.pipeline
    if plan.code or pipeline.replicas or not sides(plan):
        return ()
    return axes_between(placements(plan), pipeline.partition)


def axes_between(placed: Mapping[str, Placement], partition: Sequence[int]) -> tuple[int, ...]:
    """Axes of the grid over which what passes between stages of `partition` layers is split by
    tokens: those along which the last norm of every stage but the last is, if these are the same.
    """
    lasts = (stop - 1 for stop in accumulate(partition[:-1]))
    norms = {placed.get(f"blocks.{layer}.mlp_norm", ()) for layer in lasts}
    split = {tuple(a for a, name in enumerate(norm) if name == "tokens") for norm in norms}
    return split.pop() if len(split) == 1 else ()


def pieces(plan: ResolvedPlan) -> dict[str, dict[str, int]]:
    """Module -> pieces of each dimension, for all modules that the plan's operators name."""
    return {name: site.pieces(form) for name, (site, form) in _named(plan).items()}


def _named(plan: ResolvedPlan) -> dict[str, tuple[Site, Form]]:
    ranks = plan.strategy.tensor.ranks
    tokens = plan.training.sequence_length // plan.strategy.context.size
    found = sites(plan.shape, _sequences(plan), ranks, tokens)
    return matched(plan.strategy.operators, found, ranks)


def _sequences(plan: ResolvedPlan) -> int:
    """Sequences of a microbatch on every rank; replicas of a stage that share each microbatch have
    some of them, of which any number of pieces must be legal on all.
    """
    pipeline, batch = plan.strategy.pipeline, plan.training.micro_batch
    if not pipeline.replicas or pipeline.is_round_robin:
        return batch
    parts = (part for count in pipeline.replicas for part in even_parts(batch, count))
    return math.gcd(*(stop - start for start, stop in parts))


def sites(shape: Shape, sequences: int, ranks: int, tokens: int) -> dict[str, Site]:
    """Modules of a model of ours that a strategy may name.

    Args:
        shape: The model.
        sequences: Of a microbatch.
        ranks: Tensor ranks, which padded vocabularies divide.
        tokens: Of a sequence on a context rank.
    """
    rows = {"rows": sequences, "tokens": tokens}
    padded = -(-shape.vocab // (WORD * ranks)) * WORD * ranks
    vocabulary = rows | {"vocabulary": padded, "hidden": shape.hidden}
    table = Site("Embedding", vocabulary, scatters=True)
    norm = Site("Norm", rows)
    found = {"embedding.tokens": table} | ({"embedding.norm": norm} if shape.embedding_norm else {})
    block = {"attention_norm": norm, "mlp_norm": norm} | _attention_sites(shape, rows)
    dense = block | _mlp_sites(shape, rows)
    sparse = block | _moe_sites(shape, rows) if shape.moe else dense
    for i in range(shape.layers):
        own = dense if shape.moe is None or i < shape.moe.first_dense else sparse
        found |= {f"blocks.{i}.{name}": site for name, site in own.items()}
    head = Site("MatMul", rows | {"inner": shape.hidden, "columns": padded})
    loss = Site("CrossEntropy", rows | {"vocabulary": padded})
    return found | {"final_norm": norm, "head": head, "head.loss": loss}


def _attention_sites(shape: Shape, rows: dict[str, int]) -> dict[str, Site]:
    groups = math.gcd(shape.heads, int(shape.kv_heads or shape.heads))
    project = _linear(rows, shape.hidden, groups)
    return {f"attention.{name}": project for name in "qkv"} | {
        "attention.attend": Site("FlashAttention", rows | {"heads": groups}),
        "attention.o": _linear(rows, groups, shape.hidden),
    }


def _linear(rows: dict[str, int], inner: int, columns: int) -> Site:
    return Site("MatMul", rows | {"inner": inner, "columns": columns}, scatters=True)


def _mlp_sites(shape: Shape, rows: dict[str, int]) -> dict[str, Site]:
    wide = _linear(rows, shape.hidden, shape.ffn)
    kind = "GatedActivation" if shape.gated else "Activation"
    gate = {"mlp.gate": wide} if shape.gated else {}
    return gate | {
        "mlp.up": wide,
        "mlp.activate": Site(kind, rows | {"width": shape.ffn}),
        "mlp.down": _linear(rows, shape.ffn, shape.hidden),
    }


def _moe_sites(shape: Shape, rows: dict[str, int]) -> dict[str, Site]:
    assert shape.moe is not None
    return {"mlp": Site("MoE", rows | {"width": shape.moe.ffn})}


def _beside(plan: ResolvedPlan) -> Iterator[Problem]:
    """Other answers to how an operator is split."""
    s, ranks = plan.strategy, plan.strategy.tensor.ranks
    if s.tensor.algorithm != "1d":
        what = f"is '{s.tensor.algorithm}', which splits every operator over one grid, but "
        what += "strategy.operators say how each is split; legal: '1d'"
        yield Problem("strategy.tensor.algorithm", what)
    if s.tensor.sequence:
        what = "is true, which splits norms and dropout by tokens, but strategy.operators say how "
        what += "they are split; legal: false, e.g. with blocks.*.*_norm: "
        yield Problem("strategy.tensor.sequence", what + strategy_text(((1, ranks, 1), (1,))))
    if s.expert.tensor is not None:
        what = f"is {s.expert.tensor}, but strategy.operators say how experts are split; legal: "
        what += f"null, e.g. with blocks.*.mlp: {strategy_text(((1,), (s.expert.tensor,)))}"
        yield Problem("strategy.expert.tensor", what)


def _fitting(plan: ResolvedPlan) -> Iterator[Problem]:
    found = pieces(plan)
    yield from _loss(plan, found)
    yield from _loss_axes(_named(plan), sides(plan))
    yield from _exchanged_heads(plan, found)
    if plan.shape.tied:
        yield from _tied(_named(plan), sides(plan))


def _exchanged_heads(plan: ResolvedPlan, pieces: dict[str, dict[str, int]]) -> Iterator[Problem]:
    """Ulysses exchanges the heads that a layer's attention has; unnamed, it follows its query."""
    ranks, heads = plan.strategy.context.num_ulysses_ranks, plan.shape.heads
    for layer in range(plan.shape.layers):
        attention = f"blocks.{layer}.attention"
        split = pieces.get(f"{attention}.q", {}).get("columns", 1)
        split = pieces.get(f"{attention}.attend", {"heads": split}).get("heads", 1)
        if heads // split % ranks:
            legal = [n for n in divisors(ranks) if heads // split % n == 0]
            what = f"exchanges heads over {ranks} ranks, but {attention} has {heads // split} on a "
            what += f"rank, of {heads} that strategy.operators split {split} ways; legal: "
            yield Problem("strategy.context.size", what + near(ranks, legal))
            return


def _loss(plan: ResolvedPlan, pieces: dict[str, dict[str, int]]) -> Iterator[Problem]:
    """Only even pieces of logits are redistributed."""
    head = pieces.get("head", {})
    own = {name: head.get(name, 1) for name in ("rows", "tokens")}
    own["vocabulary"] = head.get("columns", 1)
    vocabulary = pieces.get("head.loss", own)["vocabulary"]
    uneven = [n for n in (own["vocabulary"], vocabulary) if plan.shape.vocab % n]
    if pieces.get("head.loss", own) != own and uneven:
        tokens = (own["tokens"],) if own["tokens"] > 1 else ()
        rows = own["rows"], *tokens
        legal = strategy_text(((*rows, own["vocabulary"]), rows))
        yield Problem(
            "strategy.operators.head.loss",
            f"differs from the head's, and {uneven[0]} pieces do not divide "
            f"vocab = {plan.shape.vocab}; legal: {legal}",
        )


def _loss_axes(found: dict[str, tuple[Site, Form]], grid: tuple[int, ...]) -> Iterator[Problem]:
    """The loss adds up over neighboring axes of the grid, which have one group."""
    name = "head.loss" if "head.loss" in found else "head"
    if name not in found:
        return
    site, form = found[name]
    split = "vocabulary" if name == "head.loss" else "columns"
    axes = [a for a, placed in enumerate(site.placement(form, grid)) if placed == split]
    if not are_neighbors(axes):
        ways = site.pieces(form)[split]
        yield Problem(
            f"strategy.operators.{name}",
            f"splits the vocabulary {ways} ways, over axes {axes} of the grid {list(grid)}, which "
            f"are not neighbors; legal: {', '.join(map(str, sorted({1, *grid})))} ways",
        )


def _tied(found: dict[str, tuple[Site, Form]], grid: tuple[int, ...]) -> Iterator[Problem]:
    """The head shares the embedding's weight: both split it over the same axes of the grid, and
    leave parts of its gradient over the same axes, whether these split sequences or tokens.
    """
    names = "embedding.tokens", "head"
    named = {name: found[name] for name in names if name in found}
    table, head = (
        named[name][0].placement(named[name][1], grid) if name in named else () for name in names
    )
    same = [_axes(table, a) == _axes(head, b) for a, b in _SHARED]
    if not all(same) or "hidden" in table:
        pieces = named[names[0]][0].pieces(named[names[0]][1]) if table else {}
        tokens = (pieces["tokens"],) if pieces.get("tokens", 1) > 1 else ()
        form = (pieces.get("rows", 1), *tokens, 1), (1, pieces.get("vocabulary", 1))
        legal = f"{strategy_text(form)} for the head, and an embedding that is not split by hidden"
        what = "splits the weight that it shares with embedding.tokens in another way"
        yield Problem("strategy.operators.head", f"{what}; legal: {legal}")


def _axes(placed: Placement, names: tuple[str, ...]) -> list[int]:
    return [axis for axis, name in enumerate(placed) if name in names]
