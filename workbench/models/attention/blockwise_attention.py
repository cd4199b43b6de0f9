"""Attention over tiles of queries and of the keys that they see, with any score rule.

    flash       torch's CPU kernel, which adds a mask; no soft-cap
    blockwise   plain operators in fp32 or better, on any device

Tiles whose keys no query sees are skipped, and no tensor is as long as the sequence in two dims
(FlashAttention, Dao et al. 2022, arXiv 2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.models.attention.attention_kernels import (
    AttentionBlock,
    attend_block,
    attend_block_backward,
)
from workbench.models.attention.score_rule import ScoreRule
from workbench.models.attention.soft_cap import soft_cap_
from workbench.runtime_facts.attention_tiles import TILE_QUERIES


class Chunk(NamedTuple):
    """Tokens that follow each other in the sequence, in rows that follow each other."""

    row: int
    """Of the first, in the tensor."""
    position: int
    """Of the first, in the sequence."""
    length: int

    @property
    def positions(self) -> range:
        """Of its tokens in the sequence."""
        return range(self.position, self.position + self.length)

    def rows(self, positions: range) -> slice:
        """Rows in the tensor of some of its positions."""
        first = self.row + positions.start - self.position
        return slice(first, first + len(positions))


class Tile(NamedTuple):
    """Queries and keys of which each query sees one or more."""

    query_rows: slice
    key_rows: slice
    queries: range
    """Positions in the sequence."""
    keys: range


def visible_tiles(
    queries: Sequence[Chunk], keys: Sequence[Chunk], window: int | None
) -> Iterator[Tile]:
    """Tiles of up to `TILE_QUERIES` queries of a chunk and what they see of a chunk of keys."""
    for chunk in queries:
        for start in range(chunk.position, chunk.positions.stop, TILE_QUERIES):
            rows = range(start, min(start + TILE_QUERIES, chunk.positions.stop))
            for others in keys:
                if tile := _visible(chunk, rows, others, window):
                    yield tile


def _visible(chunk: Chunk, queries: range, others: Chunk, window: int | None) -> Tile | None:
    first = 0 if window is None else queries.start - window + 1
    all_keys = others.positions
    keys = range(max(all_keys.start, first), min(all_keys.stop, queries.stop))
    if not keys:
        return None
    last = queries.stop if window is None else min(queries.stop, keys.stop - 1 + window)
    seeing = range(max(queries.start, keys.start), last)
    return Tile(chunk.rows(seeing), others.rows(keys), seeing, keys)


def blockwise_attention(
    kernel: str,
    rule: ScoreRule,
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    starts_BT: Tensor | None = None,
) -> Tensor:
    """Causal attention of a sequence to itself, differentiable.

    Args:
        kernel: flash (CPU, no soft-cap) or blockwise.
        rule: What is done to scores.
        q_BHTK: [B, H, T, head_dim].
        k_BGTK: [B, G, T, head_dim]; GQA: G key-value heads, which divide H.
        v_BGTK: The same shape.
        starts_BT: First token of each query's document; None: one document.

    Returns:
        [B, H, T, head_dim].
    """
    out: Tensor = _BlockwiseAttention.apply(kernel, rule, q_BHTK, k_BGTK, v_BGTK, starts_BT)
    return out


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: str,
        rule: ScoreRule,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor | None,
    ) -> Tensor:
        out = torch.empty_like(q)
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = torch.empty(q.shape[:-1], dtype=wide, device=q.device)
        for tile in _own_tiles(q, rule):
            block = attend_tile(kernel, rule, q, k, v, tile, starts)
            out[:, :, tile.query_rows], lse[:, :, tile.query_rows] = block
        ctx.save_for_backward(q, k, v, out, lse)
        # The step holds the starts; saved, they would be offloaded with a layer's activations.
        ctx.kernel, ctx.rule, ctx.starts = kernel, rule, starts
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        full, dq = AttentionBlock(out, lse), torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        for tile in _own_tiles(q, ctx.rule):
            parts = attend_tile_backward(
                ctx.kernel, ctx.rule, gradient, q, k, v, full, tile, ctx.starts
            )
            dq[:, :, tile.query_rows] = parts[0]
            dk[:, :, tile.key_rows] += parts[1]
            dv[:, :, tile.key_rows] += parts[2]
            del parts
        return None, None, dq, dk.to(k.dtype), dv.to(v.dtype), None


def _own_tiles(q: Tensor, rule: ScoreRule) -> Iterator[Tile]:
    sequence = [Chunk(0, 0, q.shape[2])]
    return visible_tiles(sequence, sequence, rule.window)


def attend_tile(
    kernel: str,
    rule: ScoreRule,
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    tile: Tile,
    starts_BT: Tensor | None = None,
) -> AttentionBlock:
    """Attention of a tile's queries to its keys, and the log-sum-exp of its logits: zero and
    minus infinity where none of them is of a query's document (`starts_BT`, of all queries).
    """
    q, starts = q_BHTK[:, :, tile.query_rows], _own_starts(starts_BT, tile)
    k, v = (x[:, :, tile.key_rows] for x in (k_BGSK, v_BGSK))
    if kernel == "flash":
        mask, scale = _mask(rule, tile, q, starts), rule.scale_of(q.shape[-1])
        block = attend_block(kernel, q, k, v, False, mask, scale)
        if starts is not None:  # torch's kernel says 0 of a query that sees no key
            block.lse.masked_fill_((starts >= tile.keys.stop)[:, None], -torch.inf)
        return block
    q, k, v = (_wide(x) for x in (q, k, v))
    logits, _ = _logits(rule, q, k, tile, starts)
    lse = logits.logsumexp(-1)
    finite = lse if starts is None else lse.clamp_min(torch.finfo(lse.dtype).min)
    probabilities = logits.sub_(finite[..., None]).exp_()
    return AttentionBlock(_by_group(probabilities, k).matmul(v).view(q.shape), lse)


def attend_tile_backward(
    kernel: str,
    rule: ScoreRule,
    gradient_BHTK: Tensor,
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    full: AttentionBlock,
    tile: Tile,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a tile's queries, keys and values.

    Args:
        kernel: flash (CPU, no soft-cap) or blockwise.
        rule: What is done to scores.
        gradient_BHTK: Gradient of the output.
        q_BHTK: Of the rank's tokens.
        k_BGSK: In which the tile has rows.
        v_BGSK: The same shape.
        full: Output and LSE of the queries' attention to all keys, not to the tile's alone.
        tile: The tile.
        starts_BT: First token of the document of each of the rank's tokens; None: one document.
    """
    starts = _own_starts(starts_BT, tile)
    gradient, q, out, lse = (
        x[:, :, tile.query_rows] for x in (gradient_BHTK, q_BHTK, full.out, full.lse)
    )
    k, v = (x[:, :, tile.key_rows] for x in (k_BGSK, v_BGSK))
    scale = rule.scale_of(q.shape[-1])
    if kernel == "flash":
        part, mask = AttentionBlock(out, lse), _mask(rule, tile, q, starts)
        return attend_block_backward(kernel, gradient, q, k, v, part, False, mask, scale)
    gradient, q, out, k, v = (_wide(x) for x in (gradient, q, out, k, v))
    logits, derivative = _logits(rule, q, k, tile, starts)
    probabilities = logits.sub_(lse[..., None]).exp_()
    own = _by_group(gradient, k)
    dv = _by_group(probabilities, k).mT.matmul(own)
    d_logits = own.matmul(v.mT).view(probabilities.shape)
    d_logits.sub_((gradient * out).sum(-1, keepdim=True)).mul_(probabilities)
    if derivative is not None:
        d_logits.mul_(derivative)
    d_scores = _by_group(d_logits.mul_(scale), k)
    dq = d_scores.matmul(k).view(q.shape)
    return dq, d_scores.mT.matmul(_by_group(q, k)), dv


def _own_starts(starts_BT: Tensor | None, tile: Tile) -> Tensor | None:
    return None if starts_BT is None else starts_BT[:, tile.query_rows]


def _logits(
    rule: ScoreRule, q: Tensor, k: Tensor, tile: Tile, starts: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The softmax's logits [B, H, T, S], and the derivative of the soft-cap where there is one."""
    scores = _by_group(q, k).matmul(k.mT).view(*q.shape[:-1], k.shape[2])
    scores.mul_(rule.scale_of(q.shape[-1]))
    derivative = None
    if rule.softcap is not None:
        derivative = soft_cap_(scores, rule.softcap)
    return rule.add_to(scores, tile.queries, tile.keys, starts), derivative


def _mask(rule: ScoreRule, tile: Tile, q: Tensor, starts: Tensor | None) -> Tensor:
    return rule.mask(tile.queries, tile.keys, _wide_dtype(q), q.device, starts)


def _by_group(x_BHTX: Tensor, k_BGSK: Tensor) -> Tensor:
    """[B, H, T, X] as [B, G, H / G x T, X]: the rows that see each of G key-value heads."""
    return x_BHTX.reshape(x_BHTX.shape[0], k_BGSK.shape[1], -1, x_BHTX.shape[-1])


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide(x: Tensor) -> Tensor:
    return x.to(_wide_dtype(x))


def math_attention(
    rule: ScoreRule, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, starts_BT: Tensor | None = None
) -> Tensor:
    """The same by plain operators over all queries and keys, which keep logits [B, H, T, T].

    Args:
        rule: What is done to scores.
        q_BHTK: [B, H, T, head_dim].
        k_BHTK: The same shape.
        v_BHTK: The same shape.
        starts_BT: First token of each query's document; None: one document.
    """
    q, k, v = (_wide(x) for x in (q_BHTK, k_BHTK, v_BHTK))
    scores = (q * rule.scale_of(q.shape[-1])).matmul(k.mT)
    if rule.softcap is not None:
        scores = (scores / rule.softcap).tanh() * rule.softcap
    positions = range(q.shape[2])
    # Biases need no gradient, and that of a masked score is zero without autograd's mask.
    with torch.no_grad():
        rule.add_to(scores, positions, positions, starts_BT)
    out: Tensor = scores.softmax(-1).matmul(v)
    return out.to(q_BHTK.dtype)
