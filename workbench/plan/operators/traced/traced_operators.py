"""A traced graph as operators and the tensors between them, for pricing and search.

Operators that only move data are none of their own: they keep the layout of what they move, and the
tensor between two operators is what the second reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from workbench.plan.operators.operator_graph import (
    Operator,
    OperatorDim,
    OperatorGraph,
    OperatorTensor,
    TensorEdge,
)
from workbench.plan.operators.operator_sites import ORDER, ROWS, Site
from workbench.plan.operators.traced.dim_rules import moves_data_only
from workbench.plan.operators.traced.node_factors import FactoredGraph
from workbench.plan.operators.traced.traced_graph import TensorRef, TracedNode
from workbench.plan.operators.traced.traced_sites import SiteDims, site_dims, traced_sites

UNSHARDED = "unsharded"
"""In an edge, stands for a dimension that one of its two operators has and the other has not."""
INDICES = ("torch.int64", "torch.int32", "torch.bool")
Kind = Literal["activation", "parameter", "tied", "index"]
Positions = Mapping[int, int]
"""Place of a factor in a row in one tensor -> its place in another."""


def traced_operators(factored: FactoredGraph) -> OperatorGraph:
    """The operators of a module that strategies can name, and the tensors between them."""
    maker = _Maker(factored)
    nodes = [node for node in factored.graph.nodes if node.id in maker.dims]
    index = {node.id: i for i, node in enumerate(nodes)}
    operators = [maker.operator(node) for node in nodes]
    edges = [
        edge
        for node, operator in zip(nodes, operators)
        for edge in maker.edges(node, operator, index, operators)
    ]
    return maker.with_tied(nodes, operators, edges)


class _Maker:
    """Makes operators and edges of one graph."""

    def __init__(self, factored: FactoredGraph) -> None:
        self.factored = factored
        self.dims: dict[str, SiteDims] = site_dims(factored)
        self.sites: dict[str, Site] = traced_sites(factored)
        self.nodes = {node.id: node for node in factored.graph.nodes}
        self.tensors = factored.graph.tensors()
        self.learned = {*factored.graph.parameters}
        """Ids of what depends on parameters: the others have no gradient."""
        for node in factored.graph.nodes:
            if any(ref.source in self.learned for ref in node.inputs):
                self.learned.add(node.id)

    def operator(self, node: TracedNode) -> Operator:
        """The operator of a node."""
        own, site = self.dims[node.id], self.sites[node.name]
        sizes = {name: 1 for _, names in own.written for name in names}
        for local, size in self.factored.nodes[node.id].sizes.items():
            if local in own.names:
                sizes[own.names[local]] = sizes.get(own.names[local], 1) * size
        known = sorted(sizes, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
        dims = [OperatorDim(name, sizes[name], site.units[name]) for name in known]
        if ROWS not in sizes:  # the dimension that takes the outermost axes
            dims.insert(0, OperatorDim(ROWS, 1))
        inputs = tuple(
            self._tensor(node.inputs[at], f"input {at + 1}", written, sizes)
            for at, written in own.written
        )
        kind = site.kind
        if kind == "MatMul" and not {ROWS, "inner", "columns"} <= sizes.keys():
            kind = "Einsum"
        output = self._output(node, sizes)
        if kind == "CrossEntropy":
            # A vocabulary in pieces makes partial sums of three numbers a token.
            dims.append(OperatorDim("three", 3))
            output = OperatorTensor("statistics", (ROWS, "three"))
        return Operator(
            node.name,
            kind,
            (*dims, OperatorDim(UNSHARDED, 1)),
            inputs,
            output,
            gemm_widths=(sizes["columns"],) if kind == "MatMul" else (),
            causal_flops=_attention_flops(node, self.tensors[node.inputs[1]].shape)
            if kind == "FlashAttention"
            else 0.0,
            modules=(node.name,),
            traced=True,
        )

    def _output(self, node: TracedNode, sizes: Mapping[str, int]) -> OperatorTensor:
        names, output = self.dims[node.id].names, self.factored.nodes[node.id].outputs[0]
        dims = tuple(dict.fromkeys(names[local] for local in output if local in names))
        return self._tensor(TensorRef(node.id), "output", dims, sizes)

    def _tensor(
        self, ref: TensorRef, name: str, dims: tuple[str, ...], sizes: Mapping[str, int]
    ) -> OperatorTensor:
        share = math.prod(self.tensors[ref].shape) / math.prod(sizes[each] for each in dims)
        learned = self.tensors[ref].dtype not in INDICES and ref.source in self.learned
        kind: Kind = "activation" if learned else "index"
        if self._parameter(ref) is not None:
            kind = "parameter"
        return OperatorTensor(name, dims, kind, share)

    def _parameter(self, ref: TensorRef) -> str | None:
        """The parameter that a tensor is a view of, if it is one."""
        found = [origin.source for origin, _ in self.origins(ref, {})]
        return found[0] if len(found) == 1 and found[0] in self.factored.graph.parameters else None

    def origins(self, ref: TensorRef, at: Positions) -> Iterator[tuple[TensorRef, Positions]]:
        """What computes a tensor or is given, behind operators that only move data.

        Args:
            ref: The tensor.
            at: Its factors that are followed -> their places in what reads it.

        Yields:
            The origin, and its factors -> their places in what reads `ref`.
        """
        node = self.nodes.get(ref.source)
        if node is None or not moves_data_only(node.op):
            yield ref, at
            return
        own = self.factored.nodes[node.id]
        written = own.outputs[ref.index]
        for source, read in zip(node.inputs, own.inputs):
            inside = {read.index(written[i]): to for i, to in at.items() if written[i] in read}
            yield from self.origins(source, inside)

    def edges(
        self,
        node: TracedNode,
        reader: Operator,
        index: Mapping[str, int],
        operators: list[Operator],
    ) -> Iterator[TensorEdge]:
        """Tensors that an operator reads of others."""
        for (at, _), tensor in zip(self.dims[node.id].written, reader.inputs):
            ref = node.inputs[at]
            places = {i: i for i in range(len(self.factored.tensors[ref].factors))}
            for origin, followed in self.origins(ref, places):
                if origin.source in index:
                    pairs = self._pairs(node, at, origin, followed)
                    source = operators[index[origin.source]]
                    own = replace(source.output, dims=tuple(one for one, _ in pairs))
                    wanted = replace(tensor, dims=tuple(two for _, two in pairs))
                    yield TensorEdge(
                        index[origin.source], own, index[node.id], _resized(wanted, tensor, reader)
                    )

    def _pairs(
        self, node: TracedNode, at: int, origin: TensorRef, followed: Positions
    ) -> list[tuple[str, str]]:
        """Dimensions of a tensor as its producer and its reader name them."""
        reader, producer = self.dims[node.id], self.dims[origin.source]
        read = self.factored.nodes[node.id].inputs[at]
        written = self.factored.nodes[origin.source].outputs[origin.index]
        wanted = {read.index(one): n for n, one in reader.sharded.items() if one in read}
        held = {written.index(one): n for n, one in producer.sharded.items() if one in written}
        pairs = [(held.pop(i, UNSHARDED), wanted.pop(to, UNSHARDED)) for i, to in followed.items()]
        pairs += [(name, UNSHARDED) for name in held.values()]
        pairs += [(UNSHARDED, name) for name in wanted.values()]
        return [pair for pair in pairs if pair != (UNSHARDED, UNSHARDED)]

    def with_tied(
        self, nodes: list[TracedNode], operators: list[Operator], edges: list[TensorEdge]
    ) -> OperatorGraph:
        """The graph, in which a parameter that several operators read is counted once."""
        first: dict[str, tuple[int, OperatorTensor]] = {}
        for index, node in enumerate(nodes):
            inputs = list(operators[index].inputs)
            for place, (at, _) in enumerate(self.dims[node.id].written):
                name = self._parameter(node.inputs[at])
                if name is not None and name in first:
                    inputs[place] = replace(inputs[place], kind="tied")
                    source, tensor = first[name]
                    edges.append(TensorEdge(source, tensor, index, _in_order(inputs[place], node)))
                elif name is not None:
                    first[name] = index, _in_order(inputs[place], node)
            operators[index] = replace(operators[index], inputs=tuple(inputs))
        return OperatorGraph(tuple(operators), tuple(edges))


def _resized(wanted: OperatorTensor, whole: OperatorTensor, reader: Operator) -> OperatorTensor:
    """A tensor of an edge, with the elements of the whole that its reader reads."""
    share = reader.size(whole) / reader.size(replace(wanted, share=1.0))
    return replace(wanted, share=share)


def _in_order(weight: OperatorTensor, node: TracedNode) -> OperatorTensor:
    """A weight with its dims in the order of the tensor."""
    return replace(weight, dims=weight.dims[::-1]) if node.op == "linear" else weight


def _attention_flops(node: TracedNode, key: tuple[int, ...]) -> float:
    """Forward FLOPs: scores and their product with the values; half if causal."""
    output = math.prod(node.outputs[0].shape)
    causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
    return 4.0 * output * key[-2] * (0.5 if causal else 1.0)
