"""Costs over an operator graph: of each strategy of each operator, and of each pair along an
edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import numpy as np

from workbench.errors import refuse
from workbench.plan.operators.operator_graph import (
    Operator,
    OperatorGraph,
    OperatorTensor,
    TensorEdge,
)
from workbench.planner.autoshard.device_mesh import LogicalMesh
from workbench.planner.autoshard.edge_table import EdgeTable, Layouts, edge_layouts, is_aligned
from workbench.planner.autoshard.machine_model import MachineModel
from workbench.planner.autoshard.operator_cost import (
    Communication,
    OperatorCost,
    TensorBytes,
    forward_again,
    gathered_again,
    operator_cost,
    recomputed,
    redistribution,
)
from workbench.planner.autoshard.operator_splits import ShardingStrategy, legal_strategies
from workbench.planner.autoshard.strategy_search.choice_problem import (
    ReshardingEdge,
    StrategyProblem,
)
from workbench.planner.autoshard.strategy_search.shared_arrays import Array, SharedArrays


@dataclass(frozen=True)
class PricedGraph:
    """A graph with some strategies of each operator, what each costs, and the choice between
    them.
    """

    graph: OperatorGraph
    pricing: GraphPricing
    options: tuple[tuple[ShardingStrategy, ...], ...]
    costs: tuple[tuple[OperatorCost, ...], ...]
    """Of one layer; the problem's costs are of all layers."""
    tables: tuple[EdgeTable, ...]
    """Of each edge."""
    memory: float | None = None
    """Bytes of a rank."""

    @property
    def mesh(self) -> LogicalMesh:
        """The ranks."""
        return self.pricing.mesh

    @cached_property
    def problem(self) -> StrategyProblem:
        """The choice at exact prices."""
        for table in self.tables:
            table.exact()
        return self.bounded()

    def bounded(self) -> StrategyProblem:
        """The choice at the prices that are known, and bounds of the others."""
        seconds, held = self._nodes
        edges: dict[tuple[int, int], Array] = {}
        shared = SharedArrays()
        for edge, table in zip(self.graph.edges, self.tables):
            # Tensors between the same two operators are one edge.
            pair = edge.source, edge.target
            costs = shared.once(np.multiply, table.seconds, fixed=edge.num_layers)
            edges[pair] = shared.once(np.add, edges[pair], costs) if pair in edges else costs
        found = tuple(ReshardingEdge(*pair, edges[pair]) for pair in sorted(edges))
        return StrategyProblem(seconds, found, held, self.memory)

    @cached_property
    def _nodes(self) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Seconds and bytes of each operator's options, in all its layers; of equal operators made
        once.
        """
        known: dict[tuple[int, int], tuple[Array, Array]] = {}
        found = []
        for operator, own in zip(self.graph.operators, self.costs):
            key = id(own), operator.num_layers
            if key not in known:
                each = [(cost.seconds, self._bytes(cost)) for cost in own]
                seconds, held = np.array(each).T * operator.num_layers
                known[key] = seconds, held
            found.append(known[key])
        seconds_of, bytes_of = zip(*found)
        return seconds_of, bytes_of

    def _bytes(self, cost: OperatorCost) -> float:
        return cost.parameter_bytes + self.pricing.in_flight * cost.activation_bytes

    def refine(self, picked: tuple[int, ...]) -> bool:
        """Price the redistributions between these options; whether any was not known."""
        pairs = ((picked[edge.source], picked[edge.target]) for edge in self.graph.edges)
        priced = [table.refine(pair) for table, pair in zip(self.tables, pairs)]
        return any(priced)

    def narrowed(self, picked: tuple[int, ...]) -> PricedGraph:
        """The same with these options alone."""
        options = [(own[option],) for own, option in zip(self.options, picked)]
        return self.pricing.price(self.graph, options, self.memory)

    def moves(self, edge: TensorEdge, picked: tuple[int, ...]) -> tuple[Communication, ...]:
        """What is redistributed along `edge`, in one layer, under these options."""
        source, target = (self.options[i][picked[i]] for i in (edge.source, edge.target))
        layouts = edge_layouts(edge, source, target)
        return self.pricing.moves(self.graph.operators[edge.target], edge.target_tensor, layouts)

    def is_aligned(self, edge: TensorEdge, picked: tuple[int, ...]) -> bool:
        """Whether the tensor of `edge` already has the layout that its reader wants."""
        source, target = (self.options[i][picked[i]] for i in (edge.source, edge.target))
        return is_aligned(edge, source, target)


@dataclass(frozen=True)
class GraphPricing:
    """Prices of operators and of redistribution; equal operators and equal edges are priced once,
    so that a layer that repeats costs nothing more.
    """

    mesh: LogicalMesh
    machine: MachineModel
    sizes: TensorBytes
    microbatches: int = 1
    """Over which a weight's gradient adds up before it is reduced."""
    recomputed_layers: int = 0
    """Layers whose forward runs again in backward; 0: none does."""
    in_flight: int = 1
    """Microbatches whose activations a pipeline stage keeps at once."""
    _options: dict[Any, tuple[ShardingStrategy, ...]] = field(default_factory=dict)
    _numbers: dict[Any, int] = field(default_factory=dict)
    """Of operators and their options, each once: keys that are quick to compare."""
    _costs: dict[tuple[Any, ...], tuple[OperatorCost, ...]] = field(default_factory=dict)
    _tables: dict[tuple[Any, ...], EdgeTable] = field(default_factory=dict)

    def options(self, operator: Operator) -> tuple[ShardingStrategy, ...]:
        """Every legal strategy of an operator."""
        key = _anonymous(operator)
        if key not in self._options:
            self._options[key] = legal_strategies(operator, self.mesh)
        return self._options[key]

    def outermost(self, count: int) -> GraphPricing:
        """Prices on the outermost axes of the mesh alone."""
        mesh = replace(self.mesh, axes=self.mesh.axes[:count])
        return GraphPricing(
            mesh,
            self.machine,
            self.sizes,
            self.microbatches,
            self.recomputed_layers,
            self.in_flight,
        )

    def refuse_indivisible(self, graph: OperatorGraph) -> None:
        """Raises `PlanError` where the ranks divide no dimension of any operator."""
        found = (option for op in graph.operators for option in self.options(op))
        if self.mesh.ranks > 1 and not any(option.num_axes for option in found):
            raise refuse("--ranks", _no_divisor_text(graph, self.mesh))

    def _cost(
        self, operator: Operator, option: ShardingStrategy, produced: frozenset[str]
    ) -> OperatorCost:
        cost = operator_cost(
            operator, option, self.mesh, self.machine, self.sizes, self.microbatches, produced
        )
        if not self._recomputes(operator):
            return cost
        # Of a layer its input is kept, which its first norm passes on as the residual stream.
        kept = cost.activation_bytes / 2 if is_first_of_layer(operator) else 0.0
        return recomputed(cost, kept, self._sharing_a_copy)

    def _recomputes(self, operator: Operator) -> bool:
        return self.recomputed_layers > 0 and is_in_layer(operator)

    def _key(self, operator: Operator) -> tuple[Any, int, bool]:
        """What an operator's price depends on."""
        shared = self._sharing_a_copy if self._recomputes(operator) else 0
        return _anonymous(operator), shared, shared > 0 and is_first_of_layer(operator)

    @property
    def _sharing_a_copy(self) -> int:
        """Layers, of every microbatch in flight, that are recomputed one at a time."""
        return self.recomputed_layers * self.in_flight

    def moves(
        self, reader: Operator, tensor: OperatorTensor, layouts: Layouts
    ) -> tuple[Communication, ...]:
        """What is redistributed for an input of `reader`, in one layer; its gradient is summed on
        the way back.
        """
        held, gradient = layouts
        size = reader.size(tensor) * self.sizes.element
        moves = redistribution(held, gradient.summed, size, self.mesh, tensor.name, gradient)
        if self._recomputes(reader):
            return moves + forward_again(moves)
        return moves + gathered_again(moves) if gathers_tokens(reader, tensor, layouts) else moves

    def price(
        self,
        graph: OperatorGraph,
        options: Sequence[tuple[ShardingStrategy, ...]] | None = None,
        memory: float | None = None,
    ) -> PricedGraph:
        """Price strategies; the redistributions between them are priced when they are asked for.

        Args:
            graph: Operators and the tensors between them.
            options: Strategies of each operator that are priced; default: all legal ones.
            memory: Bytes of a rank.
        """
        found = tuple(options or (self.options(operator) for operator in graph.operators))
        kinds = self._kinds(graph, found)
        costs = tuple(
            self._operator_costs(kind, operator, own, names)
            for kind, operator, own, names in zip(kinds, graph.operators, found, _produced(graph))
        )
        tables = tuple(self._table(graph, edge, found, kinds) for edge in graph.edges)
        return PricedGraph(graph, self, found, costs, tables, memory)

    def _kinds(
        self, graph: OperatorGraph, options: tuple[tuple[ShardingStrategy, ...], ...]
    ) -> list[tuple[int, int]]:
        """Numbers of each operator's price and of its options; those of equals are equal."""
        # Equal operators mostly share their options: each such tuple is hashed once.
        distinct = {id(own): own for own in options}
        of_options = {key: self._number(own) for key, own in distinct.items()}
        return [
            (self._number(self._key(operator)), of_options[id(own)])
            for operator, own in zip(graph.operators, options)
        ]

    def _number(self, known: Any) -> int:
        return self._numbers.setdefault(known, len(self._numbers))

    def _operator_costs(
        self,
        kind: tuple[int, int],
        operator: Operator,
        options: tuple[ShardingStrategy, ...],
        produced: frozenset[str],
    ) -> tuple[OperatorCost, ...]:
        """What strategies cost in one layer, where other operators produce these inputs."""
        key = kind, produced
        if key not in self._costs:
            self._costs[key] = tuple(self._cost(operator, one, produced) for one in options)
        return self._costs[key]

    def _table(
        self,
        graph: OperatorGraph,
        edge: TensorEdge,
        options: tuple[tuple[ShardingStrategy, ...], ...],
        kinds: Sequence[tuple[int, int]],
    ) -> EdgeTable:
        tensors = edge.source_tensor, edge.target_tensor, edge.unpadded
        key = kinds[edge.source], kinds[edge.target], tensors
        if key not in self._tables:
            reader, tensor = graph.operators[edge.target], edge.target_tensor
            size = reader.size(tensor) * self.sizes.element
            price = partial(self._seconds, reader, tensor)
            ends = options[edge.source], options[edge.target]
            self._tables[key] = EdgeTable(edge, *ends, self.mesh, size, price)
        return self._tables[key]

    def _seconds(self, reader: Operator, tensor: OperatorTensor, layouts: Layouts) -> float:
        return sum(move.seconds for move in self.moves(reader, tensor, layouts))


def _produced(graph: OperatorGraph) -> list[frozenset[str]]:
    """Inputs of each operator that others produce."""
    found: list[set[str]] = [set() for _ in graph.operators]
    for edge in graph.edges:
        if edge.source_tensor.kind != "parameter":
            found[edge.target].add(edge.target_tensor.name)
    return [frozenset(names) for names in found]


def is_in_layer(operator: Operator) -> bool:
    """Whether an operator belongs to a transformer layer."""
    return any(module.startswith("blocks.") for module in operator.modules)


def is_first_of_layer(operator: Operator) -> bool:
    """Whether a layer's input enters here."""
    return any(module.endswith(".attention_norm") for module in operator.modules)


def gathers_tokens(reader: Operator, tensor: OperatorTensor, layouts: Layouts) -> bool:
    """Whether a GEMM reads tokens that other ranks hold. They are gathered once more in backward
    for its weight's gradient, lest they be kept (2205.05198, section 4.2.2).
    """
    if reader.kind != "MatMul" or tensor.kind != "activation" or "tokens" not in tensor.dims:
        return False
    held, gradient = (layout.dims[tensor.dims.index("tokens")] for layout in layouts)
    return not {*held} <= {*gradient}


_anonymous = attrgetter(
    *(f.name for f in fields(Operator) if f.name not in ("name", "modules", "num_layers"))
)
"""What an operator's price depends on."""


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
        or "no dimension can be split"
    )
    return (
        f"is {axes}, which no operator can be split over ({some}); legal: ranks with a factor "
        f"that divides one"
    )
