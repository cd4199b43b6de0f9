"""How many parameters a shape has, in closed form, part by part; every bias and norm counted.

What carries a bias follows `Shape.biases`: `none`; `qkv` the query, key and value projections;
`all` every linear layer of a block but a mixture's router and latent attention. A layernorm has a
weight and a bias, an rmsnorm a weight. The head never has a bias; tied to the embedding it adds
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.plan.model.model_shape import Shape

Number = Any
"""A number, or an array of one number per candidate plan."""


@dataclass(frozen=True)
class Parameters:
    """Parameters by part; blocks summed over layers."""

    embedding: int
    positions: int
    attention: int
    mlp: int
    """Dense feed-forward layers."""
    router: int
    experts: int
    """Routed and shared experts."""
    norms: int
    head: int
    prediction: int
    """What layers that predict further tokens have beside a block: a projection and norms."""
    active: int
    """Parameters that one token meets: all but the experts it is not routed to."""

    @property
    def total(self) -> int:
        """All parameters, tied weights once."""
        return (
            self.embedding
            + self.positions
            + self.attention
            + self.mlp
            + self.router
            + self.experts
            + self.norms
            + self.head
            + self.prediction
        )


def parameters(shape: Shape) -> Parameters:
    """The parameter count of `shape` by part."""
    dense = shape.moe.first_dense if shape.moe else shape.layers
    sparse = shape.layers - dense
    experts, visited = _experts(shape)
    parts = Parameters(
        embedding=shape.vocab * shape.hidden,
        positions=shape.max_positions * shape.hidden if shape.positions == "learned" else 0,
        attention=shape.layers * attention(shape),
        mlp=dense * feed_forward(shape, shape.ffn),
        router=sparse * router(shape, shape.hidden),
        experts=sparse * experts,
        norms=shape.layers * block_norms(shape)
        + (1 + shape.embedding_norm) * norm(shape, shape.hidden),
        head=0 if shape.tied else shape.vocab * shape.hidden,
        prediction=shape.mtp_layers * prediction(shape, shape.hidden, shape.hidden),
        active=0,
    )
    idle = sparse * (experts - visited)
    return Parameters(**{**vars(parts), "active": parts.total - idle})


def attention(shape: Shape) -> int:
    """Parameters of one block's attention projections, norms apart."""
    return int(attention_parameters(shape, unsharded_widths(shape)))


def feed_forward(shape: Shape, width: int) -> int:
    """Parameters of one dense feed-forward layer of `width`."""
    return int(feed_forward_parameters(shape, unsharded_widths(shape), width))


def router(shape: Shape, weight_in_dim: Number) -> Number:
    """Parameters of one layer's router, 0 without a mixture."""
    moe = shape.moe
    return 0 if moe is None else weight_in_dim * moe.experts + moe.score_bias * moe.experts


@dataclass(frozen=True)
class BlockWidths:
    """Widths of a block's weights on one rank: numbers, or arrays over candidate plans."""

    q: Number
    k: Number
    v: Number
    o: Number
    """Input of the output projection."""
    heads: Number
    weight_in_dim: Number
    """Hidden-long side of a weight; fractions of it where a tensor grid splits that side too."""
    hidden: Number
    """Hidden-wide outputs, and with them their biases."""
    hidden_parts: Number = 1
    """Parts of the hidden side of the projections onto latents."""
    in_dim_share: Number = 1
    """Share of the input side of the projections from latents."""


def unsharded_widths(shape: Shape) -> BlockWidths:
    """The widths of the whole block."""
    value = shape.heads * shape.mla.value_dim if shape.mla else shape.kv_width
    return BlockWidths(
        q=shape.q_width,
        k=shape.kv_width,
        v=value,
        o=value if shape.mla else shape.q_width,
        heads=shape.heads,
        weight_in_dim=shape.hidden,
        hidden=shape.hidden,
    )


def attention_parameters(shape: Shape, widths: BlockWidths) -> Number:
    """Parameters of one block's attention projections on a rank.

    Columns of query, key and value and rows of the output projection are split; its bias is not.
    """
    h, m = widths.weight_in_dim, shape.mla
    if m is None:
        weights = h * (widths.q + widths.k + widths.v + widths.o)
        qkv_bias = (widths.q + 2 * widths.k) * (shape.biases in ("qkv", "all"))
        return weights + (qkv_bias + widths.hidden * (shape.biases == "all"))
    latent, share = h / widths.hidden_parts, widths.in_dim_share
    query = latent * m.q_rank + share * m.q_rank * widths.q if m.q_rank else h * widths.q
    up = share * m.kv_rank * widths.heads * (m.nope_dim + m.value_dim)
    return query + latent * (m.kv_rank + m.rope_dim) + up + widths.o * h


def feed_forward_parameters(shape: Shape, widths: BlockWidths, width: Number) -> Number:
    """Parameters of one feed-forward layer on a rank, whose part of it is `width` wide."""
    wide = 2 if shape.gated else 1
    bias = wide * width + widths.hidden if shape.biases == "all" else 0
    return (wide + 1) * widths.weight_in_dim * width + bias


def block_norms(shape: Shape) -> int:
    """Parameters of one block's norms: of the residual stream, MLA's on its latents, and of
    heads.
    """
    inner = norm(shape, shape.mla.kv_rank) + norm(shape, shape.mla.q_rank or 0) if shape.mla else 0
    return shape.num_residual_norms * norm(shape, shape.hidden) + inner + head_norms(shape)


def head_norms(shape: Shape) -> int:
    """Parameters of one block's norms of queries' and keys' heads, which every tensor rank has."""
    if shape.qk_norm == "width":
        return shape.q_width + shape.kv_width
    return 2 * int(shape.head_dim or 0) if shape.qk_norm else 0


def norm(shape: Shape, width: int) -> int:
    """Parameters of one norm over `width`."""
    return width * (2 if shape.norm == "layernorm" else 1)


def prediction(shape: Shape, weight_in_dim: Number, columns: Number) -> Number:
    """Parameters that one layer which predicts a further token has beside its block, on a rank: the
    projection of the hidden state and the next token's embedding, joined, and norms of both and of
    its output (2412.19437, 2.2).

    Args:
        shape: The model.
        weight_in_dim: Hidden-long side of a weight.
        columns: Outputs of the projection.
    """
    return 2 * weight_in_dim * columns + 3 * norm(shape, shape.hidden)


def prediction_matrices(shape: Shape) -> int:
    """Weights beside its blocks that a token is multiplied with to predict further tokens: the head
    once more for each, and the projection.
    """
    return shape.mtp_layers * (shape.hidden * shape.vocab + 2 * shape.hidden**2)


def block_matrices(shape: Shape, layer: int) -> int:
    """Weights of block `layer` that a token is multiplied with: matrices only, visited experts
    only.
    """
    bare = shape.model_copy(update={"biases": "none"})
    if shape.moe is None or layer < shape.moe.first_dense:
        return attention(bare) + feed_forward(bare, shape.ffn)
    return attention(bare) + _experts(bare)[1] + shape.hidden * shape.moe.experts


def _experts(shape: Shape) -> tuple[int, int]:
    """Parameters of one layer's experts: (all, those that a token visits)."""
    if shape.moe is None:
        return 0, 0
    one, shared = (
        feed_forward(shape, shape.moe.ffn),
        feed_forward(shape, shape.moe.shared * shape.moe.ffn),
    )
    shared = (
        shared if shape.moe.shared else 0
    )  # side by side in one layer, with one bias of its output
    return shape.moe.experts * one + shared, shape.moe.top_k * one + shared
