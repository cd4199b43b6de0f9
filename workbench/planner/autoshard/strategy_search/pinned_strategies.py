"""Strategies that the user names: which operators they pin, and which layers they tell apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import groupby

import numpy as np

from workbench.errors import PlanError, Problem
from workbench.plan.operators.layer_patterns import layer_pattern
from workbench.plan.operators.operator_graph import Operator, OperatorGraph, TensorEdge
from workbench.plan.operators.strategy_form import Form, strategy_text
from workbench.plan.operators.unknown_patterns import unknown_pattern
from workbench.planner.autoshard.edge_table import legal_together
from workbench.planner.autoshard.graph_pricing import GraphPricing, PricedGraph
from workbench.planner.autoshard.operator_splits import ShardingStrategy, shortest_form
from workbench.planner.autoshard.strategy_search.choice_problem import ReshardingEdge
from workbench.planner.autoshard.strategy_search.series_parallel import solve_by_dynamic_programming

MAX_LISTED = 8
"""Legal strategies that a refusal lists."""


def layer_runs(modules: Iterable[str], num_layers: int, fixed: Mapping[str, Form]) -> list[int]:
    """Numbers of consecutive layers that the patterns do not tell apart.

    Args:
        modules: Of a model with one choice for layers of one kind: `blocks.*.mlp.up` and so on, or
            by the numbers of their layers.
        num_layers: Its layers.
        fixed: Module pattern -> strategy.
    """
    inside: dict[str, list[str]] = {}
    for module in modules:
        if module.startswith("blocks."):
            inside.setdefault(module.split(".", 2)[1], []).append(module)

    def matched(layer: int) -> list[tuple[str, str]]:
        own = inside.get("*", []) + inside.get(str(layer), [])
        names = [(layer_pattern(module), module.replace("*", str(layer), 1)) for module in own]
        return [(m, p) for m, name in names for p in fixed if fnmatchcase(name, p)]

    return [len(list(run)) for _, run in groupby(map(matched, range(num_layers)))]


def pinned_strategies(
    graph: OperatorGraph, options: Iterable[tuple[ShardingStrategy, ...]], fixed: Mapping[str, Form]
) -> dict[int, ShardingStrategy]:
    """Operator -> the strategy that the patterns give it, for all that they name.

    Raises:
        PlanError: A pattern names no operator, two patterns name one with different strategies, or
            a strategy is illegal for an operator.
    """
    problems = unknown_pins(graph, fixed)
    found = {}
    for index, (operator, own) in enumerate(zip(graph.operators, options)):
        asked = {p: form for p, form in fixed.items() if _matches(p, operator)}
        if len(set(asked.values())) > 1:
            problems.append(_differing(operator, asked))
        elif asked:
            form = shortest_form(operator, next(iter(asked.values())))
            legal = [option for option in own if option.form == form]
            if legal:
                found[index] = legal[0]
            else:
                problems.append(_illegal(operator, own, next(iter(asked)), form))
    if problems:
        raise PlanError(problems)
    return found


def pins_of(graph: OperatorGraph, fixed: Mapping[str, Form]) -> dict[str, Form]:
    """Those patterns that name an operator of `graph`."""
    named = (p for p in fixed if any(_matches(p, operator) for operator in graph.operators))
    return {pattern: fixed[pattern] for pattern in named}


def unknown_pins(graph: OperatorGraph, fixed: Mapping[str, Form]) -> list[Problem]:
    """The refusal of each pattern that names no operator of `graph`."""
    unknown = fixed.keys() - pins_of(graph, fixed).keys()
    names = _module_names(graph) if unknown else []
    return [unknown_pattern(pattern, names) for pattern in fixed if pattern in unknown]


def _matches(pattern: str, operator: Operator) -> bool:
    """A pattern of some layers matches the first of those that share a choice."""
    return any(fnmatchcase(module.replace("*", "0", 1), pattern) for module in operator.modules)


def _module_names(graph: OperatorGraph) -> list[str]:
    """Modules of a graph's operators, each of those that layers share once a layer."""
    return [
        module.replace("*", str(layer), 1)
        for operator in graph.operators
        for module in operator.modules
        for layer in range(operator.num_layers if "*" in module else 1)
    ]


def _differing(operator: Operator, asked: Mapping[str, Form]) -> Problem:
    said = " and ".join(f"{strategy_text(form)} ({p})" for p, form in asked.items())
    whole = f", for {', '.join(operator.modules[:3])}" if len(operator.modules) > 1 else ""
    return Problem(
        f"strategy.operators.{[*asked][-1]}",
        f"gives {operator.name} two strategies, {said}; legal: one{whole}",
    )


def _illegal(
    operator: Operator,
    options: tuple[ShardingStrategy, ...],
    pattern: str,
    form: Form,
    beside: str = "",
) -> Problem:
    """Refusal of a strategy: for its operator alone, or for want of one for the operator `beside`
    it.
    """
    forms = list(dict.fromkeys(strategy_text(option.form) for option in options))
    more = f", and {len(forms) - MAX_LISTED} more" if len(forms) > MAX_LISTED else ""
    without = f", which leaves {beside} no legal strategy" if beside else ""
    return Problem(
        f"strategy.operators.{pattern}",
        f"is {strategy_text(form)} for {operator.name}{without}; legal: "
        f"{', '.join(forms[:MAX_LISTED])}{more}",
    )


def with_shared_weights(
    graph: OperatorGraph, pricing: GraphPricing, pinned: Mapping[int, ShardingStrategy]
) -> dict[int, ShardingStrategy]:
    """The pinned strategies, and those of operators that share a weight with one of them: both have
    one layout.

    Raises:
        PlanError: No strategy of the other operator has it.
    """
    found = dict(pinned)
    for edge in graph.edges:
        if edge.source_tensor.kind == "parameter":
            for one, other in ((edge.source, edge.target), (edge.target, edge.source)):
                if one in found and other not in found:
                    found[other] = _partner(graph, pricing, edge, one, found[one])
    return found


def _partner(
    graph: OperatorGraph, pricing: GraphPricing, edge: TensorEdge, one: int, own: ShardingStrategy
) -> ShardingStrategy:
    other = graph.operators[edge.target if one == edge.source else edge.source]

    def alike(mine: ShardingStrategy, theirs: ShardingStrategy) -> bool:
        pair = (mine, theirs) if one == edge.source else (theirs, mine)
        return legal_together(edge, *pair, pricing.mesh)

    options = pricing.options(other)
    found = next((option for option in options if alike(own, option)), None)
    if found is None:
        operator = graph.operators[one]
        mine = pricing.options(operator)
        legal = tuple(a for a in mine if any(alike(a, b) for b in options))
        raise PlanError([_illegal(operator, legal, operator.modules[0], own.form, other.name)])
    return found


def legal_choice(
    priced: PricedGraph, picked: tuple[int, ...], pinned: Mapping[int, ShardingStrategy]
) -> tuple[PricedGraph, tuple[int, ...]]:
    """A choice whose operators are legal together: this one, or with other strategies for those
    that are not.

    Raises:
        PlanError: No strategies are legal beside the pinned ones.
    """
    if math.isfinite(priced.problem.total_cost(picked)):
        return priced, picked
    apart = {i for edge in _illegal_edges(priced, picked) for i in (edge.source, edge.target)}
    graph, pricing = priced.graph, priced.pricing
    options = [
        pricing.options(operator) if i in apart - pinned.keys() else (priced.options[i][picked[i]],)
        for i, operator in enumerate(graph.operators)
    ]
    freed = pricing.price(graph, options)
    found = solve_by_dynamic_programming(freed.problem)
    if not math.isfinite(freed.problem.total_cost(found)):
        raise PlanError(_no_legal_plan(freed, found, pinned))
    return freed, found


def _illegal_edges(priced: PricedGraph, picked: tuple[int, ...]) -> list[ReshardingEdge]:
    return [
        edge
        for edge in priced.problem.edges
        if not math.isfinite(edge.costs[picked[edge.source], picked[edge.target]])
    ]


def _no_legal_plan(
    priced: PricedGraph, picked: tuple[int, ...], pinned: Mapping[int, ShardingStrategy]
) -> list[Problem]:
    """What is pinned so that its neighbor has no strategy, and what would leave it one."""
    found = []
    for edge in _illegal_edges(priced, picked):
        one = edge.source if edge.source in pinned else edge.target
        operator = priced.graph.operators[one]
        other = edge.source + edge.target - one
        whole = priced.pricing.price(
            priced.graph,
            [
                priced.pricing.options(op) if i == one else priced.options[i]
                for i, op in enumerate(priced.graph.operators)
            ],
        )
        table = next(
            e.costs if one == e.source else e.costs.T
            for e in whole.problem.edges
            if {e.source, e.target} == {one, other}
        )
        legal = np.flatnonzero(np.isfinite(table).any(axis=1))
        own = tuple(whole.options[one][i] for i in legal)
        form = priced.options[one][picked[one]].form
        name = priced.graph.operators[other].name
        found.append(_illegal(operator, own, operator.modules[0], form, name))
    return found
