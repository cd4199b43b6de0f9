"""Ring attention over tiles, whose scores may have a window, biases and a soft-cap.

Keys and values travel as in `ring_attention`; of each rank's two chunks only tiles that a query of
this rank's sees are computed, so that a window skips whole chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from workbench.models.attention.attention_kernels import AttentionBlock
from workbench.models.attention.blockwise_attention import (
    Chunk,
    Tile,
    attend_tile,
    attend_tile_backward,
    visible_tiles,
)
from workbench.models.attention.score_rule import ScoreRule
from workbench.parallel.context.block_merging import merge_blocks
from workbench.parallel.context.context_collectives import start_ring_transfer, wait_ring_transfer
from workbench.parallel.mesh import MeshAxis


def blockwise_ring_attention(
    kernel: str,
    rule: ScoreRule,
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    axis: MeshAxis,
    starts_BT: Tensor | None = None,
) -> Tensor:
    """Causal attention of this rank's tokens to the unsharded sequence, differentiable.

    Args:
        kernel: flash (CPU, no soft-cap) or blockwise.
        rule: What is done to scores.
        q_BHTK: [B, H, T / ranks, head_dim], tokens in zigzag order.
        k_BGTK: [B, G, T / ranks, head_dim]; GQA: G key-value heads, which divide H.
        v_BGTK: The same shape.
        axis: The ring.
        starts_BT: Index in the sequence of the first token of each query's document; None: one
            document.
    """
    out: Tensor = _BlockwiseRing.apply(kernel, rule, q_BHTK, k_BGTK, v_BGTK, axis, starts_BT)
    return out


class _BlockwiseRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: str,
        rule: ScoreRule,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        axis: MeshAxis,
        starts: Tensor | None,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
        full = AttentionBlock(torch.zeros_like(q, dtype=wide), lse)
        keys = torch.stack((k, v))
        for step in range(axis.size):
            # Sent on before attention to them, which the transfer overlaps with.
            transfer = start_ring_transfer([keys], axis) if step < axis.size - 1 else None
            for tile in _tiles(q, step, axis, rule):
                block = attend_tile(kernel, rule, q, keys[0], keys[1], tile, starts)
                _merge(full, block, tile.query_rows)
                del block
            keys = keys if transfer is None else wait_ring_transfer(transfer)[0]
        out = full.out.to(q.dtype)
        # Only this rank's keys and values are saved: backward sends them around the ring again.
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.axis, ctx.kernel, ctx.rule, ctx.starts = axis, kernel, rule, starts
        return out

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[None, None, Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        axis, full = ctx.axis, AttentionBlock(out, lse)
        keys, dq = torch.stack((k, v)), torch.zeros_like(q, dtype=lse.dtype)
        own_dkv, gradient_transfer = torch.zeros_like(keys, dtype=lse.dtype), None
        for step in range(axis.size):
            key_transfer = start_ring_transfer([keys], axis) if step < axis.size - 1 else None
            dkv = own_dkv if step == 0 else torch.zeros_like(own_dkv)
            for tile in _tiles(q, step, axis, ctx.rule):
                dq_part, dk, dv = attend_tile_backward(
                    ctx.kernel, ctx.rule, gradient, q, keys[0], keys[1], full, tile, ctx.starts
                )
                dq[:, :, tile.query_rows] += dq_part
                dkv[0][:, :, tile.key_rows] += dk
                dkv[1][:, :, tile.key_rows] += dv
                del dq_part, dk, dv
            keys = keys if key_transfer is None else wait_ring_transfer(key_transfer)[0]
            # The gradients of travelling keys and values travel a step behind them, so that they
            # arrive during attention; one transfer after the last step brings them to their owner.
            if step > 0:
                if gradient_transfer is not None:
                    dkv += wait_ring_transfer(gradient_transfer)[0]
                gradient_transfer = start_ring_transfer([dkv], axis)
        assert gradient_transfer is not None, "a ring has two ranks or more"
        own_dkv += wait_ring_transfer(gradient_transfer)[0]
        dk, dv = own_dkv[0].to(k.dtype), own_dkv[1].to(v.dtype)
        return None, None, dq.to(q.dtype), dk, dv, None, None


def _tiles(q: Tensor, step: int, axis: MeshAxis, rule: ScoreRule) -> Iterator[Tile]:
    """Tiles of this rank's queries and of the keys at `step`, which are those of the rank `step`
    places behind.
    """
    queries, keys = (
        _chunks(q.shape[2] // 2, rank % axis.size, axis.size)
        for rank in (axis.index, axis.index - step)
    )
    return visible_tiles(queries, keys, rule.window)


def zigzag_indices(length: int, axis: MeshAxis, device: torch.device) -> Tensor:
    """Indices [length / ranks] in the sequence of this rank's tokens, in zigzag order."""
    chunks = _chunks(length // (2 * axis.size), axis.index, axis.size)
    return torch.cat([torch.arange(c.position, c.positions.stop, device=device) for c in chunks])


def _chunks(length: int, rank: int, ranks: int) -> list[Chunk]:
    """A rank's two chunks in zigzag order (`apply_context.token_indices`)."""
    last = 2 * ranks - 1 - rank
    return [Chunk(0, rank * length, length), Chunk(length, last * length, length)]


def _merge(full: AttentionBlock, block: AttentionBlock, rows: slice) -> None:
    """Merge the attention of the queries in `rows` to further keys into `full`, in place."""
    merged = merge_blocks(AttentionBlock(*(x[:, :, rows] for x in full)), block)
    for into, value in zip(full, merged):
        into[:, :, rows] = value
