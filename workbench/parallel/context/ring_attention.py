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

from workbench.models.attention.attention_kernels import (
    AttentionBlock,
    attend_block,
    attend_block_backward,
)
from workbench.models.attention.score_rule import ScoreRule
from workbench.models.seams import CAUSAL, Positions, at_least_fp32
from workbench.parallel.context.block_merging import merge_blocks
from workbench.parallel.context.blockwise_ring import blockwise_ring_attention, zigzag_indices
from workbench.parallel.context.context_collectives import start_ring_transfer, wait_ring_transfer
from workbench.parallel.mesh import MeshAxis


class RingAttend(nn.Module):
    """The attend seam by ring attention, over a sequence that is sharded over `axis`.

    Args:
        axis: The ring.
        kernel: flash, efficient or blockwise.
        rule: What is done to scores, for the query heads of this rank.
    """

    def __init__(self, axis: MeshAxis, kernel: str = "flash", rule: ScoreRule = CAUSAL) -> None:
        super().__init__()
        self.axis, self.kernel, self.rule = axis, kernel, rule

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
        q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
        length, rule = q.shape[2] * self.axis.size, self.rule
        starts = positions.document_starts
        if starts is None and rule.is_causal_only(length) and self.kernel != "blockwise":
            out: Tensor = _RingAttention.apply(q, k, v, self.axis, self.kernel, rule.scale)
        else:
            if starts is not None:
                starts = starts[:, zigzag_indices(length, self.axis, q.device)]
            out = blockwise_ring_attention(self.kernel, rule, q, k, v, self.axis, starts)
        return out.transpose(1, 2)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHTK: Tensor,
        k_BGTK: Tensor,
        v_BGTK: Tensor,
        axis: MeshAxis,
        kernel: str,
        scale: float | None,
    ) -> Tensor:
        transfer = start_ring_transfer([torch.stack((k_BGTK, v_BGTK))], axis)
        full = _upcast(attend_block(kernel, q_BHTK, k_BGTK, v_BGTK, True, scale=scale))
        for step in range(1, axis.size):
            (keys,) = wait_ring_transfer(transfer)
            # Sent on before attention to them, which the next transfer overlaps with.
            if step < axis.size - 1:
                transfer = start_ring_transfer([keys], axis)
            queries, visible = _visible_slices(q_BHTK, step, axis)
            k, v = keys[..., visible, :]
            block = attend_block(kernel, q_BHTK[:, :, queries], k, v, False, scale=scale)
            _merge_into(full, _upcast(block), queries)
        out = full.out.to(q_BHTK.dtype)
        # Only this rank's keys and values are kept: backward sends them around the ring again.
        ctx.save_for_backward(q_BHTK, k_BGTK, v_BGTK, out, full.lse)
        ctx.axis, ctx.kernel, ctx.scale = axis, kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q_BHTK, k_BGTK, v_BGTK, out_BHTK, lse_BHT = ctx.saved_tensors
        axis, kernel, full = ctx.axis, ctx.kernel, AttentionBlock(out_BHTK, lse_BHT)
        key_transfer = start_ring_transfer([torch.stack((k_BGTK, v_BGTK))], axis)
        own, scale = (q_BHTK, k_BGTK, v_BGTK), ctx.scale
        dq, dk, dv = attend_block_backward(kernel, gradient, *own, full, True, scale=scale)
        dq, own_dkv = at_least_fp32(dq), at_least_fp32(torch.stack((dk, dv)))
        gradient_transfer = None
        for step in range(1, axis.size):
            (keys,) = wait_ring_transfer(key_transfer)
            if step < axis.size - 1:
                key_transfer = start_ring_transfer([keys], axis)
            queries, visible = _visible_slices(q_BHTK, step, axis)
            k, v = keys[..., visible, :]
            part = AttentionBlock(*(x[:, :, queries] for x in full))
            seeing = gradient[:, :, queries], q_BHTK[:, :, queries]
            dq_part, dk, dv = attend_block_backward(kernel, *seeing, k, v, part, False, scale=scale)
            dq[:, :, queries] += dq_part
            # The gradients of travelling keys and values travel a step behind them, so that they
            # arrive during attention. Every rank adds its part, and one transfer after the last
            # step brings them to their owner.
            dkv = (
                torch.zeros_like(own_dkv)
                if gradient_transfer is None
                else wait_ring_transfer(gradient_transfer)[0]
            )
            dkv[..., visible, :] += torch.stack((dk, dv))
            gradient_transfer = start_ring_transfer([dkv], axis)
        assert gradient_transfer is not None, "a ring has two ranks or more"
        own_dkv += wait_ring_transfer(gradient_transfer)[0]
        dk, dv = own_dkv[0].to(k_BGTK.dtype), own_dkv[1].to(v_BGTK.dtype)
        return dq.to(q_BHTK.dtype), dk, dv, None, None, None


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
