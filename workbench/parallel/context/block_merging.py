"""Attention to several blocks of keys, merged by the log-sum-exp of each."""

from __future__ import annotations

import torch

from workbench.models.attention.attention_kernels import AttentionBlock


def merge_blocks(first: AttentionBlock, second: AttentionBlock) -> AttentionBlock:
    """Attention to both blocks of keys, from the attention to each.

    With L = logaddexp(L1, L2) the output is o1 exp(L1 - L) + o2 exp(L2 - L): each block's softmax,
    rescaled to the common denominator (online softmax, as in FlashAttention). A query that sees
    none of the keys has an L of minus infinity.
    """
    lse = torch.logaddexp(first.lse, second.lse)
    least = torch.finfo(lse.dtype).min
    parts = (
        block.out * (block.lse - lse.clamp_min(least)).exp()[..., None] for block in (first, second)
    )
    return AttentionBlock(
        sum(parts, torch.zeros((), dtype=first.out.dtype, device=first.out.device)), lse
    )
