"""Operators of a traced graph that a strategy may name: their dimensions, and how many pieces each
may be split into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from workbench.plan.operators.operator_sites import FOLDED, ROWS, Site, matched
from workbench.plan.operators.traced.dim_rules import moves_data_only
from workbench.plan.operators.traced.factors import Factor
from workbench.plan.operators.traced.graph_placement import NodePlacement
from workbench.plan.operators.traced.node_factors import FactoredGraph, Local, NodeFactors
from workbench.plan.operators.traced.traced_graph import TracedGraph

KINDS_OF_OPERATORS = {
    **dict.fromkeys(("linear", "addmm", "matmul", "mm", "bmm", "einsum"), "MatMul"),
    **dict.fromkeys(("layer_norm", "rms_norm"), "Norm"),
    "embedding": "Embedding",
    "scaled_dot_product_attention": "FlashAttention",
    "head_loss": "CrossEntropy",
}
"""Operators -> the kinds that strategies of our models know; any other is named by its operator."""


class SiteDims(NamedTuple):
    """Dimensions of an operator as strategies write them.

    Attributes:
        written: Index of each tensor input that has any, and names of its dimensions.
        names: Name of each of the operator's factors that has one.
        sharded: Name -> the factor that is sharded; None where none can be.
    """

    written: tuple[tuple[int, tuple[str, ...]], ...]
    names: Mapping[Local, str]
    sharded: dict[str, Local | None]


def site_dims(factored: FactoredGraph) -> dict[str, SiteDims]:
    """Id of each operator that computes -> its dimensions."""
    inner, computing, whole = _inner_factors(factored), _computing(factored.graph), factored
    if factored.larger and _computing(factored.larger.graph) == computing:
        whole = factored.larger
    found = {}
    for key, (op, _) in computing.items():
        own, larger = factored.nodes[key], whole.nodes[key]
        labels = _label_names(whole, larger)
        if written := _written(op, larger, _names(whole, larger, labels)):
            names = _names(factored, own, labels)
            each = dict.fromkeys(name for of_label in labels.values() for name in of_label)
            sharded = {name: _sharded_factor(factored, own, names, name, inner) for name in each}
            found[key] = SiteDims(written, names, sharded)
    return found


def _computing(graph: TracedGraph) -> dict[str, tuple[str, int]]:
    """Id of each operator that computes -> what it is, and of how many tensors."""
    live = live_ids(graph)
    each = (node for node in graph.nodes if node.id in live and not moves_data_only(node.op))
    return {node.id: (node.op, len(node.inputs)) for node in each}


def traced_sites(factored: FactoredGraph) -> dict[str, Site]:
    """Name of each operator that computes -> what a strategy may say of it."""
    dims, found = site_dims(factored), {}
    for node in factored.graph.nodes:
        if node.id in dims:
            own, sizes = dims[node.id], factored.nodes[node.id].sizes
            units = {n: 1 if local is None else sizes[local] for n, local in own.sharded.items()}
            kind = KINDS_OF_OPERATORS.get(node.op, node.op)
            found[node.name] = Site(kind, units, tuple(names for _, names in own.written))
    return found


def named_placements(
    factored: FactoredGraph, operators: Mapping[str, object], ranks: int, sides: Sequence[int]
) -> dict[str, NodePlacement]:
    """Id of each node that a plan's strategies name -> its placement on the grid of `sides`.

    Raises:
        PlanError: For each pattern that names nothing, or that is not legal for what it names.
    """
    dims = site_dims(factored)
    ids = {node.name: node.id for node in factored.graph.nodes}
    found = matched(operators, traced_sites(factored), ranks)
    return {
        ids[name]: tuple(
            None if each is None else dims[ids[name]].sharded[each]
            for each in site.placement(form, sides)
        )
        for name, (site, form) in found.items()
    }


def _label_names(factored: FactoredGraph, own: NodeFactors) -> dict[str, tuple[str, ...]]:
    """Label of each dimension that a strategy names -> its name there. The dimension with the
    sequences is `rows`, and what it has besides, heads or windows, `folded`; positions in a
    sequence are not split.
    """
    labels = dict.fromkeys(label for tensor in own.inputs for label, _ in tensor)
    of = {
        label: [own.factors[local] for local in own.sizes if local[0] == label] for label in labels
    }
    found: dict[str, tuple[str, ...]] = {}
    last = own.outputs[0][-1][0] if own.outputs[0] else ""
    for label, factors in of.items():
        others = set(factors) - factored.positions - {factored.batch}
        if factored.batch in factors:
            found[label] = (ROWS, FOLDED) if others else (ROWS,)
        elif not label.startswith("dim"):
            found[label] = (label,)
        elif others:
            found[label] = ("width" if label == last else label,)
    return found


def _names(
    factored: FactoredGraph, own: NodeFactors, labels: Mapping[str, tuple[str, ...]]
) -> dict[Local, str]:
    """Factor -> its name in a strategy, by those of its label."""
    ends = factored.positions | {factored.batch}
    return {
        local: labels[local[0]][-1] if own.factors[local] not in ends else labels[local[0]][0]
        for local in own.sizes
        if local[0] in labels
    }


def _written(
    op: str, own: NodeFactors, names: Mapping[Local, str]
) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Each tensor input that has named dimensions, by index. A linear layer's weight is written as
    the second factor of a product, inner dimension first; a bias is not written.
    """
    each = [
        tuple(dict.fromkeys(names[local] for local in tensor if local in names))
        for tensor in own.inputs
    ]
    if op == "linear":
        each[1] = each[1][::-1]
    biases = own.added | ({2} if op == "layer_norm" else set())
    return tuple((i, dims) for i, dims in enumerate(each) if dims and i not in biases)


def live_ids(graph: TracedGraph) -> set[str]:
    """Ids of what depends on tokens or parameters: the rest is the same in every step."""
    found = {graph.tokens, *graph.parameters}
    for node in graph.nodes:
        if any(ref.source in found for ref in node.inputs):
            found.add(node.id)
    return found


def _sharded_factor(
    factored: FactoredGraph,
    own: NodeFactors,
    names: Mapping[Local, str],
    name: str,
    inner: frozenset[Factor],
) -> Local | None:
    """Which factor of a dimension is sharded: that of the sequences, else the outermost that no
    operator behind it needs unsharded (the heads of 3 x heads x depth).
    """
    free = [local for local in own.sizes if names.get(local) == name and local not in own.fixed]
    batch = [local for local in free if own.factors[local] == factored.batch]
    if batch:
        return batch[0]
    if name == ROWS:  # sequences that an operator without a rule has hidden, never positions
        free = [local for local in free if own.factors[local] not in factored.positions]
    outer = [local for local in free if own.factors[local] not in inner]
    return next(iter(outer or free), None)


def _inner_factors(factored: FactoredGraph) -> frozenset[Factor]:
    """Factors that some operator which only moves data needs unsharded: parts to be split."""
    return frozenset(
        own.factors[local]
        for node in factored.graph.nodes
        if moves_data_only(node.op)
        for own in [factored.nodes[node.id]]
        for local in own.fixed
    )
