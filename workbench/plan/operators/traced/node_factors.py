"""What factors each operator of a traced graph has, and which of them may be sharded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from workbench.plan.operators.traced.dim_rules import dims_of
from workbench.plan.operators.traced.factors import Factor, Factors
from workbench.plan.operators.traced.node_dims import NodeDims, RuleInputs
from workbench.plan.operators.traced.traced_graph import TensorRef, TracedGraph, TracedNode

Local = tuple[str, int]
"""A factor of an operator: its label, and which of the label's factors it is."""


@dataclass(frozen=True)
class TensorFactors:
    """A tensor's dims as products of factors.

    Attributes:
        dims: Sizes of the factors of each dim, outermost first.
        factors: Those factors in the graph, of all dims in a row.
    """

    dims: tuple[tuple[int, ...], ...]
    factors: tuple[Factor, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of all factors in a row."""
        return tuple(size for dim in self.dims for size in dim)

    def local_sizes(self, layout: Sequence[int | None], sides: Sequence[int]) -> list[int]:
        """Local size of each factor in a row, where each axis of a grid of `sides` shards that
        which `layout` says.
        """
        return [
            size // math.prod(side for side, at in zip(sides, layout) if at == i)
            for i, size in enumerate(self.sizes)
        ]

    def local_shape(self, layout: Sequence[int | None], sides: Sequence[int]) -> list[int]:
        """Local shape of the tensor."""
        sizes = iter(self.local_sizes(layout, sides))
        return [math.prod(next(sizes) for _ in dim) for dim in self.dims]


@dataclass(frozen=True)
class NodeFactors:
    """Factors of one operator.

    Attributes:
        inputs: For each tensor input, the operator's own name of each of the tensor's factors.
        outputs: The same of each result.
        sizes: Size of each.
        fixed: Those that cannot be sharded.
        factors: Those factors in the graph.
        added: Inputs that are added to the sum (a bias), by index.
    """

    inputs: tuple[tuple[Local, ...], ...]
    outputs: tuple[tuple[Local, ...], ...]
    sizes: Mapping[Local, int]
    fixed: frozenset[Local]
    factors: Mapping[Local, Factor]
    added: frozenset[int]


@dataclass(frozen=True)
class FactoredGraph:
    """A traced graph with the factors of its tensors and operators.

    Attributes:
        batch: The factor that counts the sequences of a microbatch; None where it has one.
        positions: The factors that count the tokens of a sequence.
        larger: Of the graph's larger one, which says what its dims of size 1 are.
    """

    graph: TracedGraph
    tensors: Mapping[TensorRef, TensorFactors]
    nodes: Mapping[str, NodeFactors]
    batch: Factor | None
    positions: frozenset[Factor]
    larger: FactoredGraph | None = None


def factor_graph(graph: TracedGraph) -> FactoredGraph:
    """Follow factors through all operators of a graph."""
    pool, tensors = Factors(), graph.tensors()
    own = {
        ref: [[pool.new(size)] if size > 1 else [] for size in tensor.shape]
        for ref, tensor in tensors.items()
    }
    ruled = {
        node.id: dims_of(RuleInputs(node, tuple(tensors[ref].shape for ref in node.inputs)))
        for node in graph.nodes
    }
    broken: dict[str, set[str]] = {}
    for node in graph.nodes:
        broken[node.id] = set(_unite(node, ruled[node.id], own, pool))
    shown = {ref: _resolved(dims, pool) for ref, dims in own.items()}
    nodes = {}
    for node in graph.nodes:
        found = _node_factors(node, ruled[node.id], own, pool, broken[node.id])
        nodes[node.id] = found
    tokens = own[TensorRef(graph.tokens)]
    batch, positions = pool.resolved(tokens[0]), pool.resolved(tokens[1])
    larger = None if graph.larger is None else factor_graph(graph.larger)
    first = batch[0] if batch else None
    return FactoredGraph(graph, shown, nodes, first, frozenset(positions), larger)


def _tensors(node: TracedNode) -> list[TensorRef]:
    return [*node.inputs, *(TensorRef(node.id, i) for i in range(len(node.outputs)))]


def _unite(
    node: TracedNode, dims: NodeDims, own: dict[TensorRef, list[list[Factor]]], pool: Factors
) -> Iterator[str]:
    """Make each label's factors one in all tensors; yields labels whose factors interleave."""
    first: dict[str, list[Factor]] = {}
    for ref, tensor in zip(_tensors(node), (*dims.inputs, *dims.outputs)):
        labelled: dict[str, list[Factor]] = {}
        for place, dim in enumerate(tensor):
            made = [(label, pool.new(size)) for label, size in dim]
            pool.unite([factor for _, factor in made], own[ref][place])
            for label, factor in made:
                labelled.setdefault(label, []).append(factor)
        for label, factors in labelled.items():
            if not pool.unite(first.setdefault(label, factors), factors):
                yield label


def _resolved(dims: list[list[Factor]], pool: Factors) -> TensorFactors:
    each = [pool.resolved(dim) for dim in dims]
    sizes = tuple(tuple(pool.size(factor) for factor in dim) for dim in each)
    return TensorFactors(sizes, tuple(factor for dim in each for factor in dim))


def _node_factors(
    node: TracedNode,
    dims: NodeDims,
    own: dict[TensorRef, list[list[Factor]]],
    pool: Factors,
    broken: set[str],
) -> NodeFactors:
    sizes: dict[Local, int] = {}
    factors: dict[Local, Factor] = {}
    named = []
    for ref, tensor in zip(_tensors(node), (*dims.inputs, *dims.outputs)):
        counts: dict[str, int] = {}
        names: list[Local] = []
        for place, dim in enumerate(tensor):
            for label, factor in _labels(dim, pool.resolved(own[ref][place]), pool):
                local = label, counts.get(label, 0)
                counts[label] = local[1] + 1
                names.append(local)
                sizes[local], factors[local] = pool.size(factor), factor
        named.append(tuple(names))
    fixed = frozenset(local for local in sizes if local[0] in dims.fixed | broken)
    count = len(dims.inputs)
    return NodeFactors(
        tuple(named[:count]), tuple(named[count:]), sizes, fixed, factors, dims.added
    )


def _labels(
    dim: tuple[tuple[str, int], ...], factors: list[Factor], pool: Factors
) -> Iterator[tuple[str, Factor]]:
    """Each factor of a dim with the label whose part of the dim it is in."""
    rest = list(factors)
    for label, size in dim:
        while size > 1:
            factor = rest.pop(0)
            size //= pool.size(factor)
            yield label, factor
