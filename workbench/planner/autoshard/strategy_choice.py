"""Choose a strategy for each operator of a transformer; say what it costs and why.

The modes are those of MindSpore's `auto_parallel_search_mode`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from workbench.errors import refuse
from workbench.plan.model.model_shape import Shape
from workbench.plan.operators.operator_graph import OperatorGraph
from workbench.plan.operators.strategy_form import Form
from workbench.planner.autoshard.choice_result import OperatorPlan
from workbench.planner.autoshard.device_mesh import logical_mesh
from workbench.planner.autoshard.graph_pricing import GraphPricing, PricedGraph
from workbench.planner.autoshard.layer_operators import branch_graph, layer_graph, model_graph
from workbench.planner.autoshard.machine_model import MachineModel
from workbench.planner.autoshard.operator_cost import TensorBytes
from workbench.planner.autoshard.operator_splits import ShardingStrategy
from workbench.planner.autoshard.operator_table import Choice, operator_plan
from workbench.planner.autoshard.strategy_search.memory_limit import (
    MemoryRefusal,
    least_memory,
    solve_within_memory,
)
from workbench.planner.autoshard.strategy_search.pinned_strategies import (
    layer_runs,
    legal_choice,
    pinned_strategies,
    with_shared_weights,
)
from workbench.planner.autoshard.strategy_search.propagation import propagate
from workbench.planner.autoshard.strategy_search.propagation_reasons import (
    propagated_reasons,
    searched_reasons,
)
from workbench.planner.autoshard.strategy_search.recursive_choice import choose_recursively
from workbench.units import GIB

GraphPart = Literal["model", "layer", "attention", "mlp"]
SearchMode = Literal["dynamic_programming", "recursive_programming", "sharding_propagation"]
PRICES = tuple(4.0**k for k in range(-4, 9))
"""Prices of memory that the recursive choice tries, relative to its seconds per byte without
one.
"""


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
    mode: str = "dynamic_programming",
    recompute: bool = False,
) -> OperatorPlan:
    """The strategies of each operator: seconds of one microbatch, forward and backward, with
    nothing overlapped.

    `dynamic_programming` is exact, `recursive_programming` fast, and `sharding_propagation` follows
    the strategies that are given.

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
        mode: How the others are found.
        recompute: Whether every layer's forward runs again in backward.

    Raises:
        PlanError: Tokens, ranks, memory, the mode or a fixed strategy are illegal for this model.
    """
    length, fixed = sequence_length or tokens, fixed or {}
    if tokens < 1 or length < 1 or tokens % length:
        raise refuse(
            "tokens",
            f"is {tokens} in sequences of {length}; legal: a multiple of {length}, 1 or more",
        )
    graph = _graph(part, shape, tokens // length, length, fused, fixed)
    again = shape.layers if recompute and part == "model" else int(recompute)
    return choose_in_graph(graph, ranks, machine, memory, microbatches, sizes, fixed, mode, again)


def choose_in_graph(
    graph: OperatorGraph,
    ranks: int | Sequence[int],
    machine: MachineModel,
    memory: float | None = None,
    microbatches: int = 1,
    sizes: TensorBytes | None = None,
    fixed: Mapping[str, Form] | None = None,
    mode: str = "dynamic_programming",
    recomputed: int = 0,
    exact: bool = True,
) -> OperatorPlan:
    """The strategies of a graph's operators; arguments as of `choose_strategies`.

    Args:
        recomputed: Layers whose forward runs again in backward.
        exact: Whether the choice within a limit has to be the optimum.

    Raises:
        PlanError: Ranks, memory, the mode or a fixed strategy are illegal for this graph.
    """
    pricing = GraphPricing(
        logical_mesh(ranks, machine), machine, sizes or TensorBytes(), microbatches, recomputed
    )
    return GraphChoice(graph, pricing, fixed or {}, search_mode(mode), exact).within(memory)


@dataclass(frozen=True)
class GraphChoice:
    """A choice in one graph that is asked for under several limits; what is priced for one of them
    is known to the others.
    """

    graph: OperatorGraph
    pricing: GraphPricing
    fixed: Mapping[str, Form]
    mode: SearchMode
    exact: bool
    """Whether the choice within a limit has to be the optimum."""

    @cached_property
    def _free(self) -> Choice:
        return choose(self.graph, self.pricing, self.fixed, self.mode)

    def least_state_bytes(self) -> float:
        """Bytes of a rank's parameters with their states that no choice is below: every operator by
        the strategy that leaves it the least.
        """
        options = [self.pricing.options(operator) for operator in self.graph.operators]
        pinned = pinned_strategies(self.graph, options, self.fixed)
        priced = self.pricing.price(self.graph, _kept(self.graph, self.pricing, pinned))
        return sum(
            operator.num_layers * min(cost.parameter_bytes for cost in own)
            for operator, own in zip(self.graph.operators, priced.costs)
        )

    def num_parameters(self) -> float:
        """Of all operators, each once."""
        return sum(
            operator.num_layers * operator.size(tensor)
            for operator in self.graph.operators
            for tensor in operator.inputs
            if tensor.kind == "parameter"
        )

    def within(self, memory: float | None) -> OperatorPlan:
        """The strategies of least cost within `memory` bytes of a rank, or without a limit.

        Raises:
            PlanError: Memory or a fixed strategy are illegal for this graph.
        """
        if memory is None:
            return operator_plan(self._free, self.mode)
        if not memory > 0:
            raise refuse("--memory", f"is {memory / GIB:g} GiB a rank; legal: more than 0")
        found = choose(self.graph, self.pricing, self.fixed, self.mode, memory, self.exact)
        return operator_plan(found, self.mode, memory, self._free)


def search_mode(mode: str) -> SearchMode:
    """`mode`, if it is one. Raises `PlanError`."""
    for known in get_args(SearchMode):
        if mode == known:
            return known  # type: ignore[no-any-return]
    raise refuse("--mode", f"is {mode!r}; legal: {', '.join(get_args(SearchMode))}")


def _graph(
    part: GraphPart,
    shape: Shape,
    sequences: int,
    length: int,
    fused: bool,
    fixed: Mapping[str, Form],
) -> OperatorGraph:
    if part == "attention" or part == "mlp":
        return branch_graph(shape, sequences, length, fused, part)
    if part == "layer":
        return layer_graph(shape, sequences, length, fused)
    return pinned_model_graph(shape, sequences, length, fixed, fused)


def pinned_model_graph(
    shape: Shape, sequences: int, length: int, fixed: Mapping[str, Form], fused: bool = True
) -> OperatorGraph:
    """A model's operators, in which layers that the patterns of `fixed` tell apart have a choice
    each; other arguments as of `model_graph`. Raises `PlanError`.
    """
    graph = model_graph(shape, sequences, length, fused)
    modules = [module for operator in graph.operators for module in operator.modules]
    runs = layer_runs(modules, shape.layers, fixed)
    return graph if len(runs) == 1 else model_graph(shape, sequences, length, fused, runs)


def choose(
    graph: OperatorGraph,
    pricing: GraphPricing,
    fixed: Mapping[str, Form],
    mode: SearchMode,
    memory: float | None = None,
    exact: bool = True,
) -> Choice:
    """Search one graph.

    Args:
        graph: Operators and the tensors between them.
        pricing: What they cost on a mesh.
        fixed: Module patterns whose strategy is given.
        mode: How the others are found.
        memory: Bytes of a rank.
        exact: Whether the choice within them has to be the optimum.

    Raises:
        PlanError: No choice agrees with `fixed`, or none fits the memory.
    """
    pricing.refuse_indivisible(graph)
    options = [pricing.options(operator) for operator in graph.operators]
    named = pinned_strategies(graph, options, fixed)
    pinned = with_shared_weights(graph, pricing, named)
    if mode == "sharding_propagation":
        if not named:
            raise refuse(
                "--mode",
                "is sharding_propagation, which starts from strategies that the plan names; legal: "
                "one or more in strategy.operators, or dynamic_programming",
            )
        priced, picked, distance = propagate(graph, pricing, pinned)
        priced, picked = legal_choice(priced, picked, pinned)
        _refuse_above(priced, picked, memory)
        reasons = propagated_reasons(priced, picked, named, distance)
        return Choice(priced, picked, "sharding propagation", tuple(reasons))
    reasons = searched_reasons(len(options), named, pinned)
    if mode == "recursive_programming":
        priced, picked = _recursive(graph, pricing, pinned, memory)
        solver = "recursive programming"
    else:
        priced = pricing.price(graph, _kept(graph, pricing, pinned), memory)
        picked, solver = solve_within_memory(priced, exact)
        priced, picked = priced.narrowed(picked), (0,) * len(picked)
    priced, picked = legal_choice(priced, picked, pinned)
    return Choice(priced, picked, solver, tuple(reasons))


def _recursive(
    graph: OperatorGraph,
    pricing: GraphPricing,
    pinned: Mapping[int, ShardingStrategy],
    memory: float | None,
) -> tuple[PricedGraph, tuple[int, ...]]:
    """The recursive choice; where it takes too much memory, the one of the least price of memory
    that does not.
    """
    priced, picked = choose_recursively(graph, pricing, pinned)
    if memory is None or priced.problem.total_bytes(picked) <= memory:
        return priced, picked
    per_byte = priced.problem.total_cost(picked) / priced.problem.total_bytes(picked)
    for price in PRICES:
        priced, picked = choose_recursively(graph, pricing, pinned, price * per_byte)
        if priced.problem.total_bytes(picked) <= memory:
            return priced, picked
    priced = pricing.price(graph, _kept(graph, pricing, pinned), memory)
    return priced, least_memory(priced.bounded())


def _kept(
    graph: OperatorGraph, pricing: GraphPricing, pinned: Mapping[int, ShardingStrategy]
) -> list[tuple[ShardingStrategy, ...]]:
    """Options of each operator: all, or the one that is pinned."""
    return [
        (pinned[i],) if i in pinned else pricing.options(operator)
        for i, operator in enumerate(graph.operators)
    ]


def _refuse_above(priced: PricedGraph, picked: tuple[int, ...], memory: float | None) -> None:
    size = priced.problem.total_bytes(picked)
    if memory is not None and size > memory:
        raise MemoryRefusal(
            f"is {memory / GIB:.4g} GiB a rank, but what follows from the named strategies takes "
            f"{size / GIB:.4g} GiB (estimated); legal: {size / GIB:.4g} GiB or more, mode "
            "dynamic_programming, or strategies that split more",
            size,
        )
