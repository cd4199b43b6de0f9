"""A layer's feed-forward branch as operators: a dense layer's GEMMs and activation, or its MoE."""

from __future__ import annotations

from dataclasses import replace

from workbench.plan.model.model_shape import Moe, Shape, rows_of_an_expert
from workbench.plan.operators.operator_graph import (
    Operator,
    OperatorDim,
    OperatorGraph,
    OperatorTensor,
)
from workbench.planner.autoshard.layers.common_operators import (
    Rows,
    activation_operator,
    linear_operator,
)

Edge = tuple[str, str, int]
"""(from, to, which input)."""


def dense_operators(shape: Shape, rows: Rows) -> tuple[Operator, ...]:
    """Gate and up, which read the same input, are one operator."""
    ups = ("mlp.gate", "mlp.up") if shape.gated else ("mlp.up",)
    hidden, ffn = (shape.hidden, shape.hidden), (shape.ffn, shape.ffn)
    widths, modules = (shape.ffn,) * len(ups), [f"blocks.*.{name}" for name in ups]
    down = "blocks.*.mlp.down"
    return (
        linear_operator("mlp.up", rows, hidden, widths, shape.ffn, *modules),
        activation_operator("mlp.activate", rows, shape.ffn, len(ups), "blocks.*.mlp.activate"),
        linear_operator("mlp.down", rows, ffn, hidden[:1], shape.hidden, down),
    )


def dense_edges(shape: Shape) -> tuple[Edge, ...]:
    """What passes from the norm on within a dense feed-forward branch."""
    activated = [("mlp.up", "mlp.activate", place) for place in range(1 + shape.gated)]
    return ("mlp_norm", "mlp.up", 0), *activated, ("mlp.activate", "mlp.down", 0)


MOE_EDGES: tuple[Edge, ...] = (("mlp_norm", "mlp", 0),)
"""The same of an MoE layer."""


def moe_operator(shape: Shape, moe: Moe, rows: Rows) -> Operator:
    """An MoE layer (1701.06538): router, dispatch, experts, combine and shared experts, split by
    sequence and by the width of every expert.

    The router and its choices are repeated where the width is split, and the gradient of its weight
    is partial there, for so is the output. The dims that no strategy names are sizes: `scores` are
    a router's, `routed` the rows that the experts have of a sequence, `choices` the experts of a
    token, `matrices` those of an expert.
    """
    length = rows[1].size
    routed = length * moe.top_k
    if moe.capacity is not None:
        routed = moe.experts * rows_of_an_expert(length, moe)
    dims = (
        rows[0],
        OperatorDim("tokens", length),
        OperatorDim("hidden", shape.hidden),
        OperatorDim("width", moe.ffn, moe.ffn),
        OperatorDim("scores", moe.experts),
        OperatorDim("experts", moe.experts),
        OperatorDim("shared", moe.shared),
        OperatorDim("matrices", 3 if shape.gated else 2),
        OperatorDim("routed", routed),
        OperatorDim("choices", moe.top_k),
    )
    activation = "rows", "tokens", "hidden"
    expert = "matrices", "hidden", "width"
    shared = OperatorTensor("shared experts' weights", ("shared", *expert), "parameter")
    inputs = (
        OperatorTensor("input", activation),
        OperatorTensor("router's weight", ("scores", "hidden"), "parameter"),
        OperatorTensor("experts' weights", ("experts", *expert), "parameter"),
        *((shared,) if moe.shared else ()),
    )
    return Operator(
        "mlp",
        "MoE",
        dims,
        inputs,
        OperatorTensor("output", activation),
        sums=(OperatorTensor("aux loss", ()),) if moe.auxiliary_loss else (),
        named=(("rows",), ("width",)),
        modules=("blocks.*.mlp",),
    )


def with_spread_experts(graph: OperatorGraph, ranks: int) -> OperatorGraph:
    """The graph of models whose experts are spread over `ranks` ranks beside those of the
    operators: of `experts` each has a share, of the rows that they compute as many as before.
    """
    return replace(graph, operators=tuple(_spread(op, ranks) for op in graph.operators))


def _spread(operator: Operator, ranks: int) -> Operator:
    dims = (
        replace(dim, size=dim.size // ranks) if dim.name == "experts" else dim
        for dim in operator.dims
    )
    return replace(operator, dims=tuple(dims)) if operator.kind == "MoE" else operator
