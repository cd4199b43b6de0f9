"""Ring attention (Liu et al. 2023, arXiv 2310.01889): queries stay, keys and values travel the
ring.

Tokens are in zigzag order (`apply_context.token_indices`): of 2c chunks rank i has chunks i and
2c-1-i. A rank's attention to its own keys is causal; of an earlier rank's keys all its queries see
the first half, and none the second; a later rank's keys are all seen by the second half of its
queries, and by none of the first. Every step after the first is therefore the same half of the work
on all ranks. Blocks are merged by their log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.models.seams import Positions, at_least_fp32
from workbench.parallel.context.attention_block import (
    AttentionBlock,
    attend_block,
    attend_block_backward,
    merge_blocks,
)
from workbench.parallel.context.context_collectives import start_ring_transfer, wait_ring_transfer
from workbench.parallel.mesh import MeshAxis


class RingAttend(nn.Module):
    """The attend seam by ring attention, over a sequence that is sharded over `axis`."""

    def __init__(self, axis: MeshAxis) -> None:
        super().__init__()
        self.axis = axis

    def forward(
        self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, positions: Positions
    ) -> Tensor:
        """Causal attention of this rank's tokens to the whole sequence.

        Args:
            q_BTHK: [B, T / ranks, heads, head_dim].
            k_BTGK: [B, T / ranks, key-value heads, head_dim]; GQA heads are not repeated.
            v_BTGK: The same shape.

        Returns:
            [B, T / ranks, heads, head_dim].
        """
        heads_first = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
        out: Tensor = _RingAttention.apply(*heads_first, self.axis)
        return out.transpose(1, 2)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, axis: MeshAxis) -> Tensor:
        keys = torch.stack((k_BGTK, v_BGTK))
        transfer = start_ring_transfer([keys], axis)
        full = _upcast(attend_block(q_BHTK, k_BGTK, v_BGTK, causal=True))
        for step in range(1, axis.size):
            (keys,) = wait_ring_transfer(transfer)
            # Sent on before attention to them, which the next transfer overlaps with.
            if step < axis.size - 1:
                transfer = start_ring_transfer([keys], axis)
            queries, visible = _visible_slices(q_BHTK, step, axis)
            k, v = keys[..., visible, :]
            _merge_into(
                full, _upcast(attend_block(q_BHTK[:, :, queries], k, v, causal=False)), queries
            )
        out = full.out.to(q_BHTK.dtype)
        # Only this rank's keys and values are kept: backward sends them around the ring again.
        ctx.save_for_backward(q_BHTK, k_BGTK, v_BGTK, out, full.lse)
        ctx.axis = axis
        return out

    @staticmethod
    def backward(ctx: Any, gradient_BHTK: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BHTK, k_BGTK, v_BGTK, out_BHTK, lse_BHT = ctx.saved_tensors
        axis, full = ctx.axis, AttentionBlock(out_BHTK, lse_BHT)
        transfer = start_ring_transfer([torch.stack((k_BGTK, v_BGTK))], axis)
        dq, dk, dv = attend_block_backward(gradient_BHTK, q_BHTK, k_BGTK, v_BGTK, full, causal=True)
        dq, own_dkv = at_least_fp32(dq), at_least_fp32(torch.stack((dk, dv)))
        for step in range(1, axis.size):
            keys, *others = wait_ring_transfer(transfer)
            queries, visible = _visible_slices(q_BHTK, step, axis)
            k, v = keys[..., visible, :]
            part = AttentionBlock(*(x[:, :, queries] for x in full))
            dq_part, dk, dv = attend_block_backward(
                gradient_BHTK[:, :, queries], q_BHTK[:, :, queries], k, v, part, causal=False
            )
            dq[:, :, queries] += dq_part
            # The gradients of travelling keys and values travel with them. Every rank adds its
            # part, and one transfer after the last step brings them to their owner.
            dkv = others[0] if others else torch.zeros_like(own_dkv)
            dkv[..., visible, :] += torch.stack((dk, dv))
            last = step == axis.size - 1
            transfer = start_ring_transfer([dkv] if last else [keys, dkv], axis)
        own_dkv += wait_ring_transfer(transfer)[0]
        return (dq.to(q_BHTK.dtype), own_dkv[0].to(k_BGTK.dtype), own_dkv[1].to(v_BGTK.dtype), None)


def _visible_slices(q_BHTK: Tensor, step: int, axis: MeshAxis) -> tuple[slice, slice]:
    """(queries, keys they see) at `step`, when keys are those of the rank `step` places behind."""
    half = q_BHTK.shape[2] // 2
    from_earlier_rank = step <= axis.index
    return (slice(None), slice(0, half)) if from_earlier_rank else (slice(half, None), slice(None))


def _upcast(block: AttentionBlock) -> AttentionBlock:
    """Blocks are merged in fp32 or better: each merge would round the output once more."""
    return AttentionBlock(at_least_fp32(block.out), at_least_fp32(block.lse))


def _merge_into(full: AttentionBlock, block: AttentionBlock, queries: slice) -> None:
    """Merge the attention of some of the queries to another block of keys into `full`, in place."""
    merged = merge_blocks(AttentionBlock(*(x[:, :, queries] for x in full)), block)
    for into, value in zip(full, merged):
        into[:, :, queries] = value
