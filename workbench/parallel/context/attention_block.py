"""Blockwise attention with its log-sum-exp (LSE), so that results over several blocks can be
merged.

FlashAttention's forward and backward by torch's private fused operators, which nothing else of the
project calls.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if not "2.11" <= torch.__version__ < "2.14":
    raise ImportError(
        f"workbench.parallel.context.attention_block uses attention of torch 2.11 to 2.13, not "
        f"{torch.__version__}"
    )

aten = torch.ops.aten


class AttentionBlock(NamedTuple):
    """Attention output [B, H, T, K], and the log-sum-exp of each query's scores, [B, H, T]."""

    out: Tensor
    lse: Tensor


def attend_block(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, causal: bool) -> AttentionBlock:
    """Attention of queries to one block of keys.

    Args:
        q_BHTK: [B, H, T, head_dim].
        k_BGSK: [B, G, S, head_dim]; GQA: G key-value heads, which divide H.
        v_BGSK: The same shape.
        causal: Mask keys after each query; needs S = T.
    """
    if q_BHTK.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHTK, k_BGSK, v_BGSK, 0.0, causal
        )
        return AttentionBlock(out, lse)
    k, v = (_repeated(x, q_BHTK.shape[1]) for x in (k_BGSK, v_BGSK))
    if q_BHTK.element_size() == 2:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q_BHTK, k, v, 0.0, causal)
    else:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q_BHTK, k, v, None, True, 0.0, causal
        )
    return AttentionBlock(out, lse[..., : q_BHTK.shape[2]])


def attend_block_backward(
    gradient_BHTK: Tensor,
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    full: AttentionBlock,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values through one block of keys.

    FlashAttention's backward (Dao et al. 2022, arXiv 2205.14135) recomputes the block's
    probabilities from the LSE over *all* keys, so that each block's gradients are exact and need
    only be added up.

    Args:
        full: Output and LSE of the queries' attention to all keys, not to this block alone.
    """
    full = AttentionBlock(full.out, full.lse.contiguous())
    _assert_packed(full.lse, gradient_BHTK, q_BHTK, k_BGSK, v_BGSK, full.out)
    if q_BHTK.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient_BHTK, q_BHTK, k_BGSK, v_BGSK, full.out, full.lse, 0.0, causal
        )
        return found[0], found[1], found[2]
    groups, no_seed = k_BGSK.shape[1], torch.zeros(2, dtype=torch.int64, device=q_BHTK.device)
    k, v = (_repeated(x, q_BHTK.shape[1]) for x in (k_BGSK, v_BGSK))
    if q_BHTK.element_size() == 2:
        q, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            gradient_BHTK,
            q_BHTK,
            k,
            v,
            full.out,
            full.lse,
            None,
            None,
            q_BHTK.shape[2],
            k.shape[2],
            0.0,
            causal,
            no_seed,
            no_seed[0],
        )
    else:
        # The kernel reads the LSE in rows of a multiple of 32.
        padded = F.pad(full.lse, (0, -full.lse.shape[-1] % 32), value=torch.inf)
        q, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            gradient_BHTK,
            q_BHTK,
            k,
            v,
            None,
            full.out,
            padded,
            no_seed[0],
            no_seed[0],
            0.0,
            [True, True, True, False],
            causal,
        )
    return q, _summed(dk, groups), _summed(dv, groups)


def _assert_packed(lse_BHT: Tensor, *rows: Tensor) -> None:
    """Assert, on every device, the memory layout that CUDA's backward assumes.

    It reads the LSE by pointer as packed [B, H, T], whatever its strides: a slice's would be
    another head's. The CPU kernel honours strides, so that a wrong layout would show on GPUs only,
    as wrong gradients.
    """
    assert lse_BHT.is_contiguous(), f"the LSE has strides {lse_BHT.stride()}"
    assert all(x.stride(-1) == 1 for x in rows), (
        f"the last strides are {[x.stride(-1) for x in rows]}, not 1"
    )


def merge_blocks(first: AttentionBlock, second: AttentionBlock) -> AttentionBlock:
    """Attention to both blocks of keys, from the attention to each.

    With L = logaddexp(L1, L2) the output is o1 exp(L1 - L) + o2 exp(L2 - L): each block's softmax,
    rescaled to the common denominator (online softmax, as in FlashAttention).
    """
    lse = torch.logaddexp(first.lse, second.lse)
    parts = (block.out * (block.lse - lse).exp()[..., None] for block in (first, second))
    return AttentionBlock(
        sum(parts, torch.zeros((), dtype=first.out.dtype, device=first.out.device)), lse
    )


def _repeated(x_BGSK: Tensor, heads: int) -> Tensor:
    """Key-value heads repeated (GQA), one for every query head."""
    return (
        x_BGSK
        if x_BGSK.shape[1] == heads
        else x_BGSK.repeat_interleave(heads // x_BGSK.shape[1], dim=1)
    )


def _summed(gradient_BHSK: Tensor, groups: int) -> Tensor:
    """Gradients of repeated key-value heads, summed over the repeats."""
    heads = gradient_BHSK.shape[1]
    return (
        gradient_BHSK
        if heads == groups
        else gradient_BHSK.unflatten(1, (groups, heads // groups)).sum(2)
    )
