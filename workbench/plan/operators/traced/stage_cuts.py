"""Pipeline stages of a traced graph, cut where one tensor passes and balanced by their work."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from workbench.errors import refuse
from workbench.plan.operators.traced.graph_placement import FactorLayout, NodeShards
from workbench.plan.operators.traced.node_factors import FactoredGraph
from workbench.plan.operators.traced.traced_graph import TensorRef, TracedGraph, TracedNode
from workbench.plan.operators.traced.traced_sites import live_ids

PRODUCTS = ("linear", "addmm", "matmul", "mm", "bmm", "einsum")
ATTENTION = "scaled_dot_product_attention"


@dataclass(frozen=True)
class GraphStage:
    """A part of a graph that one pipeline stage runs.

    Attributes:
        nodes: Its operators in order, and those that make the constants that they read.
        read: What comes from the stage before; of the first, the tokens.
        written: What goes to the stage behind; of the last, the loss.
    """

    nodes: tuple[TracedNode, ...]
    read: TensorRef
    written: TensorRef


def graph_stages(
    factored: FactoredGraph, shards: Mapping[str, NodeShards], count: int, dtype: str
) -> list[GraphStage]:
    """Cut a graph into stages so that the largest has the fewest FLOPs.

    Args:
        factored: The graph.
        shards: How each operator is sharded: what passes between stages has one layout.
        count: Of stages.
        dtype: Of what passes.

    Raises:
        PlanError: There are not enough places where one tensor passes, or stages share a parameter.
    """
    graph, alive = factored.graph, live_ids(factored.graph)
    live = [node for node in graph.nodes if node.id in alive]
    places = _places(factored, shards, live, dtype) if count > 1 else {}
    if len(places) < count - 1:
        raise refuse(
            "strategy.pipeline.size",
            f"with chunks makes {count} stages, but one tensor alone passes at {len(places)} "
            f"places of the model; legal: up to {len(places) + 1} stages",
        )
    ends = _balanced(list(accumulate(_work(factored, node) for node in live)), [*places], count)
    bounds = [0, *ends, len(live)]
    refs = [TensorRef(graph.tokens), *(places[end] for end in ends), graph.output]
    stages = [
        GraphStage(_with_constants(graph, live[start:stop]), refs[i], refs[i + 1])
        for i, (start, stop) in enumerate(pairwise(bounds))
    ]
    tied_parameter(graph, stages)
    return stages


def _places(
    factored: FactoredGraph,
    shards: Mapping[str, NodeShards],
    live: Sequence[TracedNode],
    dtype: str,
) -> dict[int, TensorRef]:
    """Number of operators before each cut -> the one tensor that passes there: of all such, those
    of the commonest shape and layout.
    """
    graph = factored.graph
    tensors, produced = graph.tensors(), {node.id for node in live} | {graph.tokens}
    last = {ref: i for i, node in enumerate(live) for ref in node.inputs if ref.source in produced}
    found: dict[int, TensorRef] = {}
    alive: set[TensorRef] = {TensorRef(graph.tokens)}
    for index, node in enumerate(live):
        alive |= {TensorRef(node.id, i) for i in range(len(node.outputs))}
        alive = {ref for ref in alive if last.get(ref, -1) > index}
        if len(alive) == 1:
            (ref,) = alive
            if ref.source != graph.tokens and tensors[ref].dtype == dtype:
                found[index + 1] = ref

    def kind(ref: TensorRef) -> tuple[tuple[int, ...], FactorLayout]:
        return tensors[ref].shape, shards[ref.source].outputs[ref.index]

    if not found:
        return {}
    ((commonest, _),) = Counter(map(kind, found.values())).most_common(1)
    return {at: ref for at, ref in found.items() if kind(ref) == commonest}


def _balanced(flops: Sequence[float], places: Sequence[int], count: int) -> list[int]:
    """The `count - 1` places that leave the largest stage the fewest FLOPs (`flops` add up)."""
    ends = [*places, len(flops)]
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for _ in range(count):
        reached: dict[int, tuple[float, list[int]]] = {}
        for end in ends:
            options = [
                (max(worst, flops[end - 1] - (flops[start - 1] if start else 0.0)), [*cuts, end])
                for start, (worst, cuts) in best.items()
                if start < end
            ]
            if options:
                reached[end] = min(options)
        best = reached
    return best[len(flops)][1][:-1]


def multiply_adds(factored: FactoredGraph, node: TracedNode) -> float:
    """Of a product, or of both products of attention; 0 of other operators."""
    if node.op == ATTENTION:
        queries, keys = (factored.tensors[ref] for ref in node.inputs[:2])
        elements = math.prod(queries.sizes) + math.prod(node.outputs[0].shape)
        return float(elements * math.prod(keys.dims[-2]))
    if node.op in PRODUCTS:
        return float(math.prod(factored.nodes[node.id].sizes.values()))
    return 0.0


def _work(factored: FactoredGraph, node: TracedNode) -> float:
    """Multiply-adds of a product, else elements of the result."""
    return multiply_adds(factored, node) or float(math.prod(node.outputs[0].shape))


def _with_constants(graph: TracedGraph, nodes: Sequence[TracedNode]) -> tuple[TracedNode, ...]:
    """Operators with those that make the constants that they read; each stage makes its own."""
    live = live_ids(graph)
    needed = {ref.source for node in nodes for ref in node.inputs} | {node.id for node in nodes}
    found = []
    for node in reversed(graph.nodes):
        if node.id in needed and (node.id not in live or node in nodes):
            found.append(node)
            needed |= {ref.source for ref in node.inputs}
    return tuple(reversed(found))


def tied_parameter(graph: TracedGraph, stages: Sequence[GraphStage]) -> str | None:
    """Id of the parameter that the first and the last stage share, if there is one.

    Raises:
        PlanError: Other stages share one, or these two several.
    """
    uses: dict[str, set[int]] = {}
    for index, stage in enumerate(stages):
        for ref in (ref for node in stage.nodes for ref in node.inputs):
            if ref.source in graph.parameters:
                uses.setdefault(ref.source, set()).add(index)
    shared = [key for key, places in uses.items() if len(places) > 1]
    for key in shared:
        if uses[key] != {0, len(stages) - 1} or len(shared) > 1:
            name, places = graph.parameters[key], ", ".join(map(str, sorted(uses[key])))
            raise refuse(
                "strategy.pipeline.size",
                f"puts {name} on stages {places}; legal: 1, or one parameter that the first and "
                "the last stage share",
            )
    return shared[0] if shared else None
