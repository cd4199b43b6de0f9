"""Costs over an operator graph: of each strategy of each operator, and of each pair along an
edge.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.errors import refuse
from workbench.plan.operators.operator_graph import OperatorGraph, TensorEdge
from workbench.planner.autoshard.choice_problem import Array, ReshardingEdge, StrategyProblem
from workbench.planner.autoshard.device_mesh import LogicalMesh
from workbench.planner.autoshard.machine_model import MachineModel
from workbench.planner.autoshard.operator_cost import (
    Communication,
    OperatorCost,
    TensorBytes,
    operator_cost,
    redistribution,
)
from workbench.planner.autoshard.operator_splits import (
    ShardingStrategy,
    TensorLayout,
    legal_strategies,
)


@dataclass(frozen=True)
class PricedGraph:
    """A graph with the strategies of each operator, what each costs, and the choice between
    them.
    """

    graph: OperatorGraph
    mesh: LogicalMesh
    sizes: TensorBytes
    options: tuple[tuple[ShardingStrategy, ...], ...]
    costs: tuple[tuple[OperatorCost, ...], ...]
    """Of one layer; the problem's costs are of all layers."""
    problem: StrategyProblem

    def moves(self, edge: TensorEdge, picked: tuple[int, ...]) -> tuple[Communication, ...]:
        """What is redistributed along `edge`, in one layer, under these options."""
        held = self.options[edge.source][picked[edge.source]].layout(edge.source_tensor)
        return _moves(
            edge,
            held,
            self.options[edge.target][picked[edge.target]],
            self.graph,
            self.mesh,
            self.sizes,
        )


def price_graph(
    graph: OperatorGraph,
    grid: LogicalMesh,
    machine: MachineModel,
    sizes: TensorBytes,
    microbatches: int = 1,
    memory: float | None = None,
) -> PricedGraph:
    """Price every strategy and every redistribution.

    Args:
        graph: Operators and the tensors between them.
        grid: The ranks.
        machine: What a rank computes and communicates with.
        sizes: Bytes per element.
        microbatches: Over which a weight's gradient adds up before it is reduced.
        memory: Bytes of a rank.

    Raises:
        PlanError: The ranks divide no dimension of any operator.
    """
    options = tuple(legal_strategies(operator, grid) for operator in graph.operators)
    if grid.ranks > 1 and all(
        option.num_ranks_used(grid) == 1 for found in options for option in found
    ):
        raise refuse("ranks", _no_divisor_text(graph, grid))
    costs = tuple(
        tuple(
            operator_cost(operator, option, grid, machine, sizes, microbatches) for option in found
        )
        for operator, found in zip(graph.operators, options)
    )
    times = [operator.num_layers for operator in graph.operators]
    seconds = tuple(
        np.array([cost.seconds for cost in found]) * n for found, n in zip(costs, times)
    )
    held = tuple(np.array([cost.bytes for cost in found]) * n for found, n in zip(costs, times))
    edges: dict[
        tuple[int, int], ReshardingEdge
    ] = {}  # tensors between the same two operators are one edge of the problem
    for edge in graph.edges:
        pair, costs_of = (edge.source, edge.target), _edge_costs(edge, options, graph, grid, sizes)
        edges[pair] = ReshardingEdge(
            *pair, edges[pair].costs + costs_of if pair in edges else costs_of
        )
    return PricedGraph(
        graph,
        grid,
        sizes,
        options,
        costs,
        StrategyProblem(seconds, tuple(edges[pair] for pair in sorted(edges)), held, memory),
    )


def _edge_costs(
    edge: TensorEdge,
    options: tuple[tuple[ShardingStrategy, ...], ...],
    graph: OperatorGraph,
    grid: LogicalMesh,
    sizes: TensorBytes,
) -> Array:
    """Costs of all pairs; pairs of equal layouts are priced once."""
    known: dict[tuple[TensorLayout, TensorLayout], float] = {}
    costs = np.empty((len(options[edge.source]), len(options[edge.target])))
    for i, source in enumerate(options[edge.source]):
        held = source.layout(edge.source_tensor)
        for j, target in enumerate(options[edge.target]):
            key = held, target.layout(edge.target_tensor)
            if key not in known:
                known[key] = edge.num_layers * sum(
                    m.seconds for m in _moves(edge, held, target, graph, grid, sizes)
                )
            costs[i, j] = known[key]
    return costs


def _moves(
    edge: TensorEdge,
    held: TensorLayout,
    target: ShardingStrategy,
    graph: OperatorGraph,
    grid: LogicalMesh,
    sizes: TensorBytes,
) -> tuple[Communication, ...]:
    wanted = target.layout(edge.target_tensor)
    if edge.transposed:
        wanted = tuple(
            None if at is None else len(edge.target_tensor.dims) - 1 - at for at in wanted
        )
    size = graph.operators[edge.target].size(edge.target_tensor) * sizes.element
    return redistribution(held, wanted, size, grid, edge.target_tensor.name)


def _no_divisor_text(graph: OperatorGraph, grid: LogicalMesh) -> str:
    units = {
        f"{op.name} {dim.name}": dim.units
        for op in graph.operators
        for dim in op.dims
        if dim.units > 1
    }
    axes = " x ".join(str(axis.size) for axis in grid.axes) if grid.grid else str(grid.ranks)
    some = (
        ", ".join(f"{name} {count}" for name, count in list(units.items())[:6])
        or "nothing can be cut"
    )
    return (
        f"is {axes}, which no operator can be split over ({some}); legal: ranks with a factor "
        f"that divides one"
    )
