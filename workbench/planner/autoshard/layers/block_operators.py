"""One layer of a transformer as operators, with what passes between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from workbench.errors import refuse
from workbench.plan.model.model_shape import Shape
from workbench.plan.operators.operator_graph import Operator
from workbench.plan.rules.supported import ONLY_1D_BLOCK_FIELDS
from workbench.planner.autoshard.layers.attention_operators import (
    attention_edges,
    attention_operators,
)
from workbench.planner.autoshard.layers.common_operators import (
    linear_operator,
    norm_operator,
    token_rows,
)
from workbench.planner.autoshard.layers.feed_forward_operators import (
    MOE_EDGES,
    Edge,
    dense_edges,
    dense_operators,
    moe_operator,
)

ENTRY = "attention_norm"
"""Where what leaves the layer before enters a layer: its branch as first input, the residual stream
as second.
"""


@dataclass(frozen=True)
class Block:
    """A layer: its operators by their names within it."""

    operators: tuple[Operator, ...]
    edges: tuple[Edge, ...]

    @property
    def exits(self) -> tuple[tuple[str, int], ...]:
        """What leaves it for the next norm: a branch that is added, and the residual stream."""
        return (self.operators[-1].name, 0), ("mlp_norm", 1)


def block_operators(
    shape: Shape, sequences: int, length: int, fused: bool, has_experts: bool
) -> Block:
    """A layer with a dense feed-forward branch, or one that `has_experts`.

    Raises:
        PlanError: Nobody runs or estimates the model's attention under operator strategies.
    """
    if shape.mla is not None:
        what = f"{shape.name} has it, which this version does not run; legal for operator "
        raise refuse("model.mla", f"{what}strategies: multi-head or grouped-query attention")
    for name in ONLY_1D_BLOCK_FIELDS:
        if (value := getattr(shape, name)) is not None:
            what = f"is {value!r} of {shape.name}, which this version does not run beside "
            raise refuse(f"model.{name}", f"{what}operator strategies; legal: a model without it")
    rows = token_rows(sequences, length)
    if has_experts and shape.moe is not None:
        branch: tuple[Operator, ...] = (moe_operator(shape, shape.moe, rows),)
        edges = MOE_EDGES
    else:
        branch, edges = dense_operators(shape, rows), dense_edges(shape)
    attention = attention_operators(shape, sequences, length, fused)
    projections = _projections(shape, sequences, length)
    first, second = (
        norm_operator(name, rows, shape.hidden, f"blocks.*.{name}") for name in (ENTRY, "mlp_norm")
    )
    return Block(
        (first, projections[0], *attention, projections[1], second, *branch),
        (
            (ENTRY, "attention.qkv", 0),
            *attention_edges(attention),
            ("attention.o", "mlp_norm", 0),
            (ENTRY, "mlp_norm", 1),
            *edges,
        ),
    )


def _projections(shape: Shape, sequences: int, length: int) -> tuple[Operator, Operator]:
    """Of query, key and value, which read the same input and are one operator; and of the
    output.
    """
    rows, hidden = token_rows(sequences, length), (shape.hidden, shape.hidden)
    groups = math.gcd(shape.heads, int(shape.kv_heads or shape.heads))
    widths = (shape.q_width, shape.kv_width, shape.kv_width)
    modules = [f"blocks.*.attention.{name}" for name in "qkv"]
    into = shape.q_width, groups
    return (
        linear_operator("attention.qkv", rows, hidden, widths, groups, *modules),
        linear_operator(
            "attention.o", rows, into, hidden[:1], shape.hidden, "blocks.*.attention.o"
        ),
    )
