"""Choose a strategy for each operator of a transformer, exactly; and say what it costs and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np

from workbench.errors import PlanError, Problem, refuse
from workbench.plan.model.model_shape import Shape
from workbench.plan.operators.operator_graph import Operator, OperatorGraph
from workbench.plan.operators.strategy_form import Form, strategy_text
from workbench.planner.autoshard.choice_problem import ReshardingEdge
from workbench.planner.autoshard.choice_reasons import explain_choice
from workbench.planner.autoshard.choice_result import OperatorPlan, OperatorRow, Redistribution
from workbench.planner.autoshard.device_mesh import logical_mesh
from workbench.planner.autoshard.exact_choice import (
    solve_by_dynamic_programming,
    solve_by_integer_programming,
)
from workbench.planner.autoshard.graph_pricing import PricedGraph, price_graph
from workbench.planner.autoshard.layer_operators import branch_graph, layer_graph, model_graph
from workbench.planner.autoshard.machine_model import MachineModel
from workbench.planner.autoshard.operator_cost import TensorBytes
from workbench.planner.autoshard.operator_splits import ShardingStrategy

GraphPart = Literal["model", "layer", "attention", "mlp"]
GIB = 2**30
MAX_LISTED = 8
"""Legal strategies that a refusal lists."""


def choose_strategies(
    shape: Shape,
    tokens: int,
    ranks: int | Sequence[int],
    machine: MachineModel,
    *,
    sequence_length: int | None = None,
    part: GraphPart = "model",
    fused: bool = False,
    memory: float | None = None,
    microbatches: int = 1,
    sizes: TensorBytes | None = None,
    fixed: Mapping[str, Form] | None = None,
) -> OperatorPlan:
    """The strategies of least cost: seconds of one microbatch, forward and backward, with nothing
    overlapped.

    The optimum is exact: dynamic programming on a chain (arXiv:1802.04924), integer programming on
    a graph (arXiv:2201.12023).

    Args:
        shape: The model.
        tokens: Of one microbatch over all ranks.
        ranks: A number, or a grid such as (nodes, ranks per node), outermost first.
        machine: What a rank computes and communicates with.
        sequence_length: Tokens of a sequence, which is never split; default: one sequence.
        part: The whole model, one block among many, or one branch of a block.
        fused: Whether attention is one operator that keeps no scores.
        memory: Bytes that parameters, states and saved activations of a rank may take.
        microbatches: Over which a weight's gradient adds up before it is reduced.
        sizes: Bytes per element; default: 16-bit tensors and mixed-precision Adam.
        fixed: Module patterns whose strategy is given.

    Raises:
        PlanError: Tokens, ranks, memory or a fixed strategy are illegal for this model.
    """
    length = sequence_length or tokens
    if tokens < 1 or length < 1 or tokens % length:
        raise refuse(
            "tokens",
            f"is {tokens} in sequences of {length}; legal: a multiple of {length}, 1 or more",
        )
    if memory is not None and not memory > 0:
        raise refuse("memory", f"is {memory / GIB:g} GiB a rank; legal: more than 0")
    graph = _graph(part, shape, tokens // length, length, fused)
    priced = price_graph(
        graph, logical_mesh(ranks, machine), machine, sizes or TensorBytes(), microbatches, memory
    )
    picked, solver = solve_strategies(priced, fixed or {})
    return _operator_plan(
        priced,
        picked,
        solver,
        None if memory is None else _choice_without_limit(priced, fixed or {}),
    )


def _graph(
    part: GraphPart, shape: Shape, sequences: int, length: int, fused: bool
) -> OperatorGraph:
    if part == "attention" or part == "mlp":
        return branch_graph(shape, sequences, length, fused, part)
    return (model_graph if part == "model" else layer_graph)(shape, sequences, length, fused)


def _choice_without_limit(priced: PricedGraph, fixed: Mapping[str, Form]) -> tuple[int, ...] | None:
    """The best choice without the limit, where the limit forbids it."""
    free, _ = solve_strategies(
        replace(priced, problem=replace(priced.problem, memory_limit=None)), fixed
    )
    return free if priced.problem.total_bytes(free) > (priced.problem.memory_limit or 0.0) else None


def solve_strategies(priced: PricedGraph, fixed: Mapping[str, Form]) -> tuple[tuple[int, ...], str]:
    """The options of least cost, and the solver that found them.

    Args:
        priced: The graph with the costs of all options.
        fixed: Module patterns whose strategy is given.

    Raises:
        PlanError: No option agrees with `fixed`, or none fits the memory limit.
    """
    allowed = _allowed_options(priced, fixed)
    whole = priced.problem
    problem = replace(
        whole,
        node_costs=tuple(cost[keep] for cost, keep in zip(whole.node_costs, allowed)),
        node_bytes=tuple(size[keep] for size, keep in zip(whole.node_bytes, allowed)),
        edges=tuple(
            ReshardingEdge(
                e.source, e.target, e.costs[np.ix_(allowed[e.source], allowed[e.target])]
            )
            for e in whole.edges
        ),
    )
    least = sum(float(size.min()) for size in problem.node_bytes)
    if problem.memory_limit is not None and least > problem.memory_limit:
        size, limit = least / GIB, problem.memory_limit / GIB
        raise refuse(
            "memory",
            f"is {limit:.4g} GiB a rank, but every choice takes {size:.4g} GiB or more (estimated);"
            f" legal: {size:.4g} GiB or more, more ranks, or fewer tokens",
        )
    if problem.is_chain and problem.memory_limit is None:
        picked, solver = solve_by_dynamic_programming(problem), "dynamic programming"
    else:
        picked, solver = solve_by_integer_programming(problem), "integer programming"
    return tuple(int(keep[option]) for keep, option in zip(allowed, picked)), solver


def _allowed_options(
    priced: PricedGraph, fixed: Mapping[str, Form]
) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Options of each operator that agree with the fixed strategies. Raises `PlanError`."""
    problems = [
        _unknown(pattern, priced)
        for pattern in fixed
        if not any(_matches(pattern, op) for op in _all(priced))
    ]
    allowed = []
    for operator, options in zip(priced.graph.operators, priced.options):
        asked = {pattern: form for pattern, form in fixed.items() if _matches(pattern, operator)}
        keep = [
            i
            for i, option in enumerate(options)
            if all(option.form == form for form in asked.values())
        ]
        if not keep:
            problems.append(_illegal(operator, options, asked))
        allowed.append(np.array(keep, dtype=np.int64))
    if problems:
        raise PlanError(problems)
    return allowed


def _all(priced: PricedGraph) -> tuple[Operator, ...]:
    return priced.graph.operators


def _matches(pattern: str, operator: Operator) -> bool:
    return any(fnmatchcase(module, pattern) for module in operator.modules)


def _unknown(pattern: str, priced: PricedGraph) -> Problem:
    known = ", ".join(module for operator in _all(priced) for module in operator.modules)
    return Problem(f"strategy.operators.{pattern}", f"names no operator; legal: {known}")


def _illegal(
    operator: Operator, options: tuple[ShardingStrategy, ...], asked: Mapping[str, Form]
) -> Problem:
    forms = list(dict.fromkeys(strategy_text(option.form) for option in options))
    more = f", and {len(forms) - MAX_LISTED} more" if len(forms) > MAX_LISTED else ""
    said = " and ".join(dict.fromkeys(strategy_text(form) for form in asked.values()))
    legal = f"{', '.join(forms[:MAX_LISTED])}{more}"
    return Problem(
        f"strategy.operators.{next(iter(asked))}", f"is {said} for {operator.name}; legal: {legal}"
    )


def _operator_plan(
    priced: PricedGraph, picked: tuple[int, ...], solver: str, free: tuple[int, ...] | None
) -> OperatorPlan:
    operators, grid = priced.graph.operators, priced.mesh
    rows = tuple(_row(priced, i, option) for i, option in enumerate(picked))
    between = [
        Redistribution(
            operators[edge.source].name,
            operators[edge.target].name,
            edge.target_tensor.name,
            moves,
            edge.num_layers,
        )
        for edge in priced.graph.edges
        if (moves := priced.moves(edge, picked))
    ]
    axes = tuple(axis.size for axis in grid.axes) if grid.grid else (grid.ranks,)
    seconds, size = priced.problem.total_cost(picked), priced.problem.total_bytes(picked)
    why = explain_choice(priced, picked, free)
    return OperatorPlan(
        rows, tuple(between), axes, solver, seconds, size, priced.problem.memory_limit, why
    )


def _row(priced: PricedGraph, index: int, option: int) -> OperatorRow:
    operator, strategy = priced.graph.operators[index], priced.options[index][option]
    cost = priced.costs[index][option]
    words = describe_splits(operator, strategy, priced)
    communication = sum(move.seconds for move in cost.moves)
    return OperatorRow(
        operator.name,
        operator.kind,
        operator.modules,
        strategy_text(strategy.form),
        words,
        cost.moves,
        cost.compute,
        communication,
        cost.bytes,
        operator.num_layers,
    )


def describe_splits(operator: Operator, strategy: ShardingStrategy, priced: PricedGraph) -> str:
    """A strategy in words; on a grid with the axis of each split."""
    said = []
    for dim in operator.dims:
        axes = [a for a, name in enumerate(strategy.placement) if name == dim.name]
        if (ranks := priced.mesh.ranks_over(axes)) > 1:
            where = f" (axis {' and '.join(map(str, axes))})" if priced.mesh.grid else ""
            said.append(f"{dim.name} {ranks} ways{where}")
    return ", ".join(said) or "whole"
