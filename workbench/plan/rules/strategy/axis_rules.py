"""Legality of each parallel axis: sizes against the world, the model and each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from workbench.errors import Problem
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules import legal_sizes
from workbench.plan.rules.strategy import (
    offload_rules,
    schedule_rules,
    stage_rules,
    tensor_rules,
    tile_rules,
)
from workbench.plan.schema import AXES, Plan


def _world(plan: ResolvedPlan) -> Iterator[Problem]:
    sizes, gpus = plan.sizes, plan.world_size
    axes = [
        axis
        for axis in AXES
        if axis != "data" and (axis != "pipeline" or not plan.strategy.pipeline.replicas)
    ]
    others = math.prod(sizes[axis] for axis in axes)
    if gpus % others:
        product = " x ".join(f"{axis} {sizes[axis]}" for axis in axes)
        yield Problem(
            "cluster.gpus",
            f"is {gpus}, which {product} = {others} does not divide; "
            f"legal: gpus {legal_sizes.near(gpus, legal_sizes.multiples(gpus, others))}, or axes "
            f"whose product is {legal_sizes.near(others, legal_sizes.divisors(gpus))}",
        )
    if plan.strategy.preset == "single" and sizes["data"] > 1:
        yield Problem(
            "cluster.gpus",
            f"is {gpus}, but preset single is one device; legal: 1, or another preset (ddp)",
        )


def _data(plan: ResolvedPlan) -> Iterator[Problem]:
    data, replicas = plan.strategy.data, plan.sizes["data"] * plan.sizes["context"]
    one_size = not plan.strategy.pipeline.replicas  # else `stage_rules.replicas` says what is legal
    needs = (
        ("shard", one_size and data.shard != "all", 1),
        ("offload", one_size and data.offload != "none", 3 if data.offload == "parameters" else 1),
        ("keep_gathered", data.keep_gathered, 3),
        ("in_flight", data.in_flight != 2, 2),
    )
    for field, used, stage in needs:
        if used and data.zero < stage:
            yield Problem(
                f"strategy.data.{field}",
                f"is {getattr(data, field)}, which needs data.zero {stage} "
                f"or more; zero is {data.zero}",
            )
    yield from offload_rules.problems(plan)
    yield from tile_rules.problems(plan)
    if data.in_flight != 2 and plan.strategy.stack != "workbench":
        yield Problem(
            "strategy.data.in_flight",
            f"is {data.in_flight}, but how many {plan.strategy.stack} keeps is "
            "its own; legal: 2, or strategy.stack: workbench",
        )
    if one_size and isinstance(data.shard, int) and replicas % data.shard:
        yield Problem(
            "strategy.data.shard",
            f"is {data.shard}, which does not divide data x context = {replicas}; "
            f"legal: all, {legal_sizes.near(data.shard, legal_sizes.divisors(replicas))}",
        )


def _context(plan: ResolvedPlan) -> Iterator[Problem]:
    context, size = plan.strategy.context, plan.strategy.tensor.size
    tensor = size if isinstance(size, int) else size[0]  # heads lie along one side of a grid
    if plan.strategy.operators:
        tensor = 1  # `operator_rules` knows the heads of each layer
    length, world = plan.training.sequence_length, plan.world_size
    if context.size == 1:
        return
    kind = (length, tensor, context.algorithm, context.ulysses_size)
    if context.size not in legal_sizes.context_sizes(plan.shape, context.size, *kind):
        rule = legal_sizes.context_rule(plan.shape, *kind)
        sizes = legal_sizes.context_sizes(plan.shape, world, *kind)
        near = legal_sizes.near(context.size, sizes)
        yield Problem(
            "strategy.context.size",
            f"is {context.size}; {context.algorithm}: {rule}; legal: {near}",
        )


def _expert(plan: ResolvedPlan) -> Iterator[Problem]:
    expert, tensor = plan.strategy.expert, plan.strategy.tensor
    size, split = expert.size, expert.tensor or tensor.ranks
    if tensor.ranks % split or (tensor.algorithm != "1d" and split != tensor.ranks):
        legal = legal_sizes.divisors(tensor.ranks) if tensor.algorithm == "1d" else [tensor.ranks]
        names = ", ".join(map(str, legal))
        yield Problem(
            "strategy.expert.tensor",
            f"is {split} with {tensor.algorithm} tensor parallelism of {tensor.ranks} ranks; "
            f"legal: {names}",
        )
        return
    replicas = plan.sizes["data"] * plan.sizes["context"] * (tensor.ranks // split)
    if size == 1:
        return
    if plan.shape.moe is None:
        yield Problem(
            "strategy.expert.size", f"is {size}, but {plan.shape.name} has no experts; legal: 1"
        )
    elif size not in legal_sizes.expert_sizes(plan.shape, replicas):
        near = legal_sizes.near(size, legal_sizes.expert_sizes(plan.shape, replicas))
        yield Problem(
            "strategy.expert.size",
            f"is {size}; it divides {plan.shape.moe.experts} experts and "
            f"data x context{' x tensor / expert.tensor' * (split != tensor.ranks)} = {replicas}; "
            f"legal: {near}{_less_split(plan, split)}",
        )


def _less_split(plan: ResolvedPlan, split: int) -> str:
    """Advice on fewer tensor ranks an expert, if the expert size is legal with them."""
    expert, tensor = plan.strategy.expert, plan.strategy.tensor
    each = plan.sizes["data"] * plan.sizes["context"]
    fewer = [
        n
        for n in legal_sizes.divisors(split)
        if n < split
        and expert.size in legal_sizes.expert_sizes(plan.shape, each * tensor.ranks // n)
    ]
    legal = fewer and tensor.algorithm == "1d"
    return f", or expert.tensor {fewer[-1]}, estimated only" if legal else ""


def _placement(plan: Plan) -> Iterator[Problem]:
    order = plan.strategy.placement
    if sorted(order) != sorted(AXES):
        yield Problem("strategy.placement", f"{order} must name each of {', '.join(AXES)} once")


RULES: tuple[Callable[[ResolvedPlan], Iterator[Problem]], ...] = (
    _world,
    tensor_rules.tensor,
    stage_rules.partition,
    schedule_rules.schedule,
    schedule_rules.in_flight,
    stage_rules.replicas,
    schedule_rules.distribution,
    _data,
    _context,
    _expert,
    _placement,
)
"""Every rule of an axis; each takes a complete plan."""
WITHOUT_SHAPE: tuple[Callable[[ResolvedPlan], Iterator[Problem]], ...] = (_world, _data, _placement)
"""Those that ask nothing of the model."""
OF_LAYERS = (
    *WITHOUT_SHAPE,
    stage_rules.partition,
    schedule_rules.schedule,
    schedule_rules.in_flight,
    stage_rules.replicas,
)
"""Those that ask for no more than its layers."""
