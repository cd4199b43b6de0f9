"""Ring attention (Liu et al. 2023, arXiv 2310.01889): queries stay, keys and values go round.

Tokens are dealt as `order` says: chunks i and 2c-1-i of 2c to rank i. So a rank's own keys are
causal; of the keys of a rank before it the first half is seen by all its queries; those of a rank
after it are all seen by its second half. Every step but the first costs all ranks the same half.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.models.seams import Positions, at_least_fp32
from workbench.parallel.context.attention_block import (
    Block,
    attend_block,
    attend_block_backward,
    join,
)
from workbench.parallel.context.context_collectives import arrived, pass_on
from workbench.parallel.mesh import MeshAxis


class RingAttend(nn.Module):
    """The attend seam over a sequence that lies on several ranks."""

    def __init__(self, axis: MeshAxis) -> None:
        super().__init__()
        self.axis = axis

    def forward(
        self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, positions: Positions
    ) -> Tensor:
        """Attention output [B, T / ranks, heads, head_dim] of this rank's tokens to all that
        precede them.
        """
        out: Tensor = _Ring.apply(*(x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK)), self.axis)
        return out.transpose(1, 2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, axis: MeshAxis) -> Tensor:
        keys = torch.stack((k_BGTK, v_BGTK))
        passing = pass_on([keys], axis)
        whole = _wide(attend_block(q_BHTK, k_BGTK, v_BGTK, causal=True))
        for step in range(1, axis.size):
            (keys,) = arrived(passing)
            if step < axis.size - 1:
                passing = pass_on([keys], axis)
            queries, seen = _met(q_BHTK, step, axis)
            k, v = keys[..., seen, :]
            _join(whole, _wide(attend_block(q_BHTK[:, :, queries], k, v, causal=False)), queries)
        out = whole.out.to(q_BHTK.dtype)
        ctx.save_for_backward(q_BHTK, k_BGTK, v_BGTK, out, whole.log_sum)
        ctx.axis = axis
        return out

    @staticmethod
    def backward(ctx: Any, gradient_BHTK: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BHTK, k_BGTK, v_BGTK, out_BHTK, log_sum_BHT = ctx.saved_tensors
        axis, whole = ctx.axis, Block(out_BHTK, log_sum_BHT)
        passing = pass_on([torch.stack((k_BGTK, v_BGTK))], axis)
        dq, dk, dv = attend_block_backward(
            gradient_BHTK, q_BHTK, k_BGTK, v_BGTK, whole, causal=True
        )
        dq, own = at_least_fp32(dq), at_least_fp32(torch.stack((dk, dv)))
        for step in range(1, axis.size):
            keys, *others = arrived(passing)
            queries, seen = _met(q_BHTK, step, axis)
            k, v = keys[..., seen, :]
            part = Block(*(x[:, :, queries] for x in whole))
            dq_part, dk, dv = attend_block_backward(
                gradient_BHTK[:, :, queries], q_BHTK[:, :, queries], k, v, part, causal=False
            )
            dq[:, :, queries] += dq_part
            # Gradients of what came travel on with it, and reach its owner after the last rank.
            gradients = others[0] if others else torch.zeros_like(own)
            gradients[..., seen, :] += torch.stack((dk, dv))
            passing = pass_on([keys, gradients] if step < axis.size - 1 else [gradients], axis)
        own += arrived(passing)[0]
        return dq.to(q_BHTK.dtype), own[0].to(k_BGTK.dtype), own[1].to(v_BGTK.dtype), None


def _met(q_BHTK: Tensor, step: int, axis: MeshAxis) -> tuple[slice, slice]:
    """(queries, keys) that meet at `step`: keys are then those of the rank `step` places behind on
    the ring.
    """
    half = q_BHTK.shape[2] // 2
    from_before = step <= axis.index
    return (slice(None), slice(0, half)) if from_before else (slice(half, None), slice(None))


def _wide(block: Block) -> Block:
    """Results are joined in fp32 or better."""
    return Block(at_least_fp32(block.out), at_least_fp32(block.log_sum))


def _join(whole: Block, part: Block, queries: slice) -> None:
    """Add to `whole`, in place, the attention of some of its queries to other keys."""
    joined = join(Block(*(x[:, :, queries] for x in whole)), part)
    for into, value in zip(whole, joined):
        into[:, :, queries] = value
