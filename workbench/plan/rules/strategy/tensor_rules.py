"""Legality of tensor parallelism: sizes and grids against the model, the world and the tokens."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.errors import Problem
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules import legal_sizes


def tensor(plan: ResolvedPlan) -> Iterator[Problem]:
    """A size that leaves every rank something, or a grid that divides; tokens that it splits."""
    tensor, shape = plan.strategy.tensor, plan.shape
    if tensor.algorithm != "1d":
        yield from _grid(plan)
    elif isinstance(tensor.size, list):
        yield Problem(
            "strategy.tensor.size", f"is the grid {tensor.size}, but algorithm 1d takes one number"
        )
    elif plan.strategy.operators:
        pass  # each operator's strategy is checked by itself, and what none names is replicated
    elif reasons := legal_sizes.exceeds(shape, tensor.size):
        most = min(shape.heads, shape.ffn, shape.moe.ffn if shape.moe else shape.ffn)
        yield Problem(
            "strategy.tensor.size",
            f"is {tensor.size}, more than {', '.join(reasons)}; "
            f"legal for {shape.name}: 1 to {most}",
        )
    length = plan.training.sequence_length // plan.strategy.context.size
    if tensor.sequence and length % tensor.ranks:
        yield Problem(
            "strategy.tensor.sequence",
            f"splits {length} tokens over {tensor.ranks} ranks; legal: false, "
            "or a sequence_length that the tensor size divides",
        )


def _grid(plan: ResolvedPlan) -> Iterator[Problem]:
    tensor, shape = plan.strategy.tensor, plan.shape
    found = legal_sizes.grids(tensor.algorithm, plan.world_size, shape)
    if tensor.size not in found and tensor.ranks > 1:
        form = {"2d": "[q, q]", "2.5d": "[q, q, d] with d up to q", "3d": "[l, l, l]"}[
            tensor.algorithm
        ]
        widths = f"heads = {shape.heads}, hidden = {shape.hidden} and ffn = {shape.ffn}"
        yield Problem(
            "strategy.tensor.size",
            f"is {tensor.size}; algorithm {tensor.algorithm} takes {form} whose "
            f"product divides {plan.world_size} and whose sides divide {widths}; "
            f"legal: {', '.join(map(str, found))}",
        )
    parts, batch = legal_sizes.token_parts(tensor.algorithm, tensor.size), plan.training.micro_batch
    if batch % parts:
        yield Problem(
            "training.micro_batch",
            f"is {batch}, which {tensor.algorithm} grid {tensor.size} splits "
            f"into {parts}; legal: {legal_sizes.near(batch, legal_sizes.multiples(batch, parts))}",
        )
    if tensor.sequence:
        yield Problem(
            "strategy.tensor.sequence",
            f"is true, which algorithm {tensor.algorithm} already implies; legal: false",
        )
