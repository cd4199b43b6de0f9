"""Where the factors of every operator of a traced graph lie on a grid of ranks.

Operators that a plan names are sharded as it says. The others follow the input that is sharded and
largest, where that leaves no sum to reduce; what cannot follow runs on replicated inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from workbench.plan.operators.strategy_form import are_neighbors
from workbench.plan.operators.traced.dim_rules import has_rule
from workbench.plan.operators.traced.node_factors import FactoredGraph, Local, NodeFactors
from workbench.plan.operators.traced.traced_graph import TensorRef, TracedNode

FactorLayout = tuple[int | None, ...]
"""Of a tensor: for each axis of the grid, outermost first, which of the tensor's factors in a row
it shards; None where its ranks hold the same.
"""
NodePlacement = tuple[Local | None, ...]
"""For each axis of the grid the factor of an operator that it shards; None: it repeats the work."""


@dataclass(frozen=True)
class NodeShards:
    """How one operator is sharded.

    Attributes:
        inputs: Layout that it reads each tensor input in.
        partial_inputs: For each, the axes over which the input's gradient is a partial sum.
        outputs: Layout of each result, once it is summed.
        partial: Axes over which its results are partial sums.
    """

    placement: NodePlacement
    inputs: tuple[FactorLayout, ...]
    partial_inputs: tuple[frozenset[int], ...]
    outputs: tuple[FactorLayout, ...]
    partial: frozenset[int]


@dataclass(frozen=True)
class ParameterShards:
    """How a parameter is stored, and what its gradient is summed over once a step.

    Attributes:
        layout: On the grid.
        summed: Axes of the grid over which the gradients of all its uses are partial sums.
    """

    layout: FactorLayout
    summed: frozenset[int]


def place_graph(
    factored: FactoredGraph, named: Mapping[str, NodePlacement], sides: Sequence[int]
) -> dict[str, NodeShards]:
    """Node id -> how it is sharded on a grid of `sides`.

    Args:
        factored: The graph.
        named: Node id -> placement, of the operators that a plan names.
        sides: Ranks along each axis of the grid, outermost first.
    """
    found: dict[str, NodeShards] = {}
    held: dict[TensorRef, FactorLayout] = {}
    replicated: FactorLayout = (None,) * len(sides)
    for node in factored.graph.nodes:
        own = factored.nodes[node.id]
        placement = named.get(node.id)
        if placement is None:
            layouts = [held.get(ref, replicated) for ref in node.inputs]
            placement = _following(factored, node, layouts, sides)
        shards = found[node.id] = node_shards(own, placement)
        held |= {TensorRef(node.id, i): layout for i, layout in enumerate(shards.outputs)}
    return found


def node_shards(own: NodeFactors, placement: NodePlacement) -> NodeShards:
    """How an operator's tensors are sharded under a placement."""
    partial = _absent(own.outputs[0], placement)
    return NodeShards(
        placement,
        tuple(_layout(names, placement) for names in own.inputs),
        tuple(
            _absent(names, placement) - (partial if i in own.added else frozenset())
            for i, names in enumerate(own.inputs)
        ),
        tuple(_layout(names, placement) for names in own.outputs),
        partial,
    )


def parameter_shards(
    factored: FactoredGraph, shards: Mapping[str, NodeShards], sides: Sequence[int]
) -> dict[str, ParameterShards]:
    """Id of each parameter -> how it is stored: sharded as all of its uses read it."""
    uses: dict[str, list[tuple[FactorLayout, frozenset[int]]]] = {
        name: [] for name in factored.graph.parameters
    }
    for node in factored.graph.nodes:
        own = shards[node.id]
        for ref, layout, partial in zip(node.inputs, own.inputs, own.partial_inputs):
            if ref.source in uses:
                uses[ref.source].append((layout, partial))
    return {
        name: _stored(factored, TensorRef(name), found, len(sides)) for name, found in uses.items()
    }


def _stored(
    factored: FactoredGraph,
    ref: TensorRef,
    uses: Sequence[tuple[FactorLayout, frozenset[int]]],
    num_axes: int,
) -> ParameterShards:
    layout: list[int | None] = [None] * num_axes
    for axis in range(num_axes):
        wanted = {use[axis] for use, _ in uses}
        if len(wanted) == 1:
            layout[axis] = wanted.pop()
    layout = _one_factor_a_dim(factored, ref, layout)
    summed = frozenset(
        axis
        for axis in range(num_axes)
        if uses
        and layout[axis] is None
        and all(_is_term(axis, use, partial, layout) for use, partial in uses)
    )
    return ParameterShards(tuple(layout), summed)


def _is_term(
    axis: int, use: FactorLayout, partial: frozenset[int], stored: Sequence[int | None]
) -> bool:
    """Whether a rank's use of a parameter leaves a term of its gradient's sum over an axis.
    Where it
    reads a slice, of all that it stores.
    """
    return axis in partial or (use[axis] is not None and use[axis] not in stored)


def _one_factor_a_dim(
    factored: FactoredGraph, ref: TensorRef, layout: list[int | None]
) -> list[int | None]:
    """The layout, in which at most one factor of each dim is sharded: the first."""
    dims = factored.tensors[ref].dims
    of = [place for place, dim in enumerate(dims) for _ in dim]
    first: dict[int, int] = {}
    return [at if at is not None and first.setdefault(of[at], at) == at else None for at in layout]


def _layout(names: Sequence[Local], placement: NodePlacement) -> FactorLayout:
    return tuple(
        names.index(local) if local is not None and local in names else None for local in placement
    )


def _absent(names: Sequence[Local], placement: NodePlacement) -> frozenset[int]:
    return frozenset(
        axis for axis, local in enumerate(placement) if local is not None and local not in names
    )


def _following(
    factored: FactoredGraph, node: TracedNode, held: Sequence[FactorLayout], sides: Sequence[int]
) -> NodePlacement:
    """The placement of an operator that no plan names, by those of its inputs."""
    own = factored.nodes[node.id]
    order = sorted(
        range(len(held)), key=lambda i: -math.prod(factored.tensors[node.inputs[i]].sizes)
    )
    placement: list[Local | None] = [None] * len(sides)
    for axis in range(len(sides)):
        candidates = (own.inputs[i][at] for i in order if (at := held[i][axis]) is not None)
        placement[axis] = next(
            (each for each in candidates if _can_follow(node, own, each, placement, sides, axis)),
            None,
        )
    return tuple(placement)


def _can_follow(
    node: TracedNode,
    own: NodeFactors,
    local: Local,
    placement: Sequence[Local | None],
    sides: Sequence[int],
    axis: int,
) -> bool:
    """Whether an operator can be sharded by a factor with no sum to reduce; a loss by its
    vocabulary, if neighboring axes do.
    """
    if local in own.fixed:
        return False
    if node.op == "head_loss" and local[0] == "vocabulary":
        return are_neighbors([a for a, other in enumerate(placement) if other == local] + [axis])
    kept = all(local in names for names in own.outputs) or node.op == "head_loss"
    shards = math.prod(side for side, other in zip(sides, placement) if other == local)
    return kept and own.sizes[local] % (shards * sides[axis]) == 0


def unruled(factored: FactoredGraph) -> Iterator[str]:
    """In words, operators without a rule: they run on replicated inputs."""
    for node in factored.graph.nodes:
        if not has_rule(node.op) and factored.nodes[node.id].sizes:
            yield f"{node.name} ({node.op}, {node.line}) has no rule: it runs on replicated inputs."
