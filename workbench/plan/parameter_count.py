"""How many parameters a shape has, in closed form, part by part; every bias and norm counted.

What carries a bias follows `Shape.biases`: `none`; `qkv` the query, key and value projections;
`all` every linear layer of a block but a mixture's router and latent attention. A layernorm has a
weight and a bias, an rmsnorm a weight. The head never has a bias; tied to the embedding it adds
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.plan.model_shape import Shape


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
        router=sparse * (shape.hidden * shape.moe.experts if shape.moe else 0),
        experts=sparse * experts,
        norms=shape.layers * block_norms(shape)
        + (1 + shape.embedding_norm) * norm(shape, shape.hidden),
        head=0 if shape.tied else shape.vocab * shape.hidden,
        active=0,
    )
    idle = sparse * (experts - visited)
    return Parameters(**{**vars(parts), "active": parts.total - idle})


def attention(shape: Shape) -> int:
    """Parameters of one block's attention projections, norms apart."""
    h = shape.hidden
    if shape.mla is None:
        q, kv = shape.q_width, shape.kv_width
        weights = h * (q + 2 * kv) + q * h
        return weights + _bias(shape, ("qkv", "all"), q + 2 * kv) + _bias(shape, ("all",), h)
    m = shape.mla
    query = h * m.q_rank + m.q_rank * shape.q_width if m.q_rank else h * shape.q_width
    latent = h * (m.kv_rank + m.rope_dim) + m.kv_rank * shape.heads * (m.nope_dim + m.value_dim)
    return query + latent + shape.heads * m.value_dim * h


def feed_forward(shape: Shape, width: int) -> int:
    """Parameters of one dense feed-forward layer of `width`."""
    wide = 2 if shape.gated else 1
    return (wide + 1) * shape.hidden * width + _bias(shape, ("all",), wide * width + shape.hidden)


def block_norms(shape: Shape) -> int:
    """Parameters of one block's norms: before attention, before the feed-forward layer, and MLA's
    on its latents.
    """
    inner = norm(shape, shape.mla.kv_rank) + norm(shape, shape.mla.q_rank or 0) if shape.mla else 0
    return 2 * norm(shape, shape.hidden) + inner


def norm(shape: Shape, width: int) -> int:
    """Parameters of one norm over `width`."""
    return width * (2 if shape.norm == "layernorm" else 1)


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


def _bias(shape: Shape, kinds: tuple[str, ...], width: int) -> int:
    return width if shape.biases in kinds else 0
