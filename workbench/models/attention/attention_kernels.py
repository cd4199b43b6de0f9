"""Attention kernels, by torch's private operators, which nothing else of the project calls.

    flash       FlashAttention-2 (Dao 2023, arXiv 2307.08691): 16 bits, compute capability 8.0 on
    efficient   memory-efficient attention (Rabe and Staats 2021, arXiv 2112.05682): any dtype, one
                key-value head for every query head
    math        plain operators, which keep scores [B, H, T, T] for backward

On CPU flash and efficient are torch's one CPU kernel. CUDA's kernels read tensors by pointer, so
that what they assume of memory layout, dtype and head size is asserted on every device that can
tell: strides everywhere, the rest on GPUs and in rehearsals of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.planned_device import REHEARSED_GPU, on_gpu

if not "2.11" <= torch.__version__ < "2.14":
    raise ImportError(
        f"workbench.models.attention.attention_kernels uses attention of torch 2.11 to 2.13, not "
        f"{torch.__version__}"
    )

aten = torch.ops.aten
FLASH_MULTIPLE = 8
"""Head sizes that flash takes; others are padded with zeros."""
LSE_ROWS = 32
"""The efficient kernel reads the LSE in rows of a multiple of so many entries."""


class AttentionBlock(NamedTuple):
    """Attention output [B, H, T, K], and the log-sum-exp of each query's scores, [B, H, T]."""

    out: Tensor
    lse: Tensor


def attention(
    kernel: str, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scale: float | None = None
) -> Tensor:
    """Causal attention, differentiable.

    Args:
        kernel: flash, efficient or math.
        q_BHTK: [B, H, T, head_dim].
        k_BGTK: [B, G, T, head_dim]; G key-value heads that divide H for flash, else H.
        v_BGTK: The same shape.
        scale: Factor of scores; None: head_dim^-1/2.

    Returns:
        [B, H, T, head_dim].
    """
    if kernel == "math":
        out: Tensor = aten._scaled_dot_product_attention_math(
            q_BHTK, k_BGTK, v_BGTK, is_causal=True, scale=scale
        )[0]
        return out
    if not on_gpu(q_BHTK):
        grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
        return F.scaled_dot_product_attention(
            q_BHTK, k_BGTK, v_BGTK, is_causal=True, scale=scale, enable_gqa=grouped
        )
    head_dim = q_BHTK.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    if kernel == "flash" and head_dim % FLASH_MULTIPLE:
        rest = -head_dim % FLASH_MULTIPLE
        q_BHTK, k_BGTK, v_BGTK = (F.pad(x, (0, rest)) for x in (q_BHTK, k_BGTK, v_BGTK))
    attended: Tensor = _GpuAttention.apply(kernel, q_BHTK, k_BGTK, v_BGTK, scale)
    return attended[..., :head_dim]


class _GpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out, lse = _forward(kernel, q, k, v, True, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.scale = kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        full = AttentionBlock(out, lse)
        return None, *_backward(ctx.kernel, gradient, q, k, v, full, True, ctx.scale), None


def attend_block(
    kernel: str,
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    causal: bool,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> AttentionBlock:
    """Attention of queries to one block of keys, with its LSE so that blocks can be merged.

    Args:
        kernel: flash or efficient.
        q_BHTK: [B, H, T, head_dim].
        k_BGSK: [B, G, S, head_dim]; GQA: G key-value heads, which divide H.
        v_BGSK: The same shape.
        causal: Mask keys after each query; needs S = T.
        mask: Added to scores, [1, H or 1, T, S]; on CPU only.
        scale: Factor of scores; None: head_dim^-1/2.
    """
    scale = q_BHTK.shape[-1] ** -0.5 if scale is None else scale
    repeats = kernel == "efficient" and on_gpu(q_BHTK)
    k, v = (repeat_heads(x, q_BHTK.shape[1]) if repeats else x for x in (k_BGSK, v_BGSK))
    out, lse = _forward(kernel, q_BHTK, k, v, causal, scale, mask)
    return AttentionBlock(out, lse[..., : q_BHTK.shape[2]])


def attend_block_backward(
    kernel: str,
    gradient_BHTK: Tensor,
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    full: AttentionBlock,
    causal: bool,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values through one block of keys.

    FlashAttention's backward (Dao et al. 2022, arXiv 2205.14135) recomputes the block's
    probabilities from the LSE over *all* keys, so that each block's gradients are exact and need
    only be added up.

    Args:
        kernel: flash or efficient.
        gradient_BHTK: Gradient of the output.
        q_BHTK: As in forward.
        k_BGSK: As in forward.
        v_BGSK: As in forward.
        full: Output and LSE of the queries' attention to all keys, not to this block alone.
        causal: As in forward.
        mask: As in forward.
        scale: As in forward.
    """
    groups, repeats = k_BGSK.shape[1], kernel == "efficient" and on_gpu(q_BHTK)
    k, v = (repeat_heads(x, q_BHTK.shape[1]) if repeats else x for x in (k_BGSK, v_BGSK))
    lse = full.lse.contiguous()
    if repeats:
        lse = F.pad(lse, (0, -lse.shape[-1] % LSE_ROWS), value=torch.inf)
    block = AttentionBlock(full.out, lse)
    scale = q_BHTK.shape[-1] ** -0.5 if scale is None else scale
    dq, dk, dv = _backward(kernel, gradient_BHTK, q_BHTK, k, v, block, causal, scale, mask)
    return dq, _summed(dk, groups), _summed(dv, groups)


def repeat_heads(x_BGSK: Tensor, heads: int) -> Tensor:
    """Key-value heads repeated (GQA), one for every query head."""
    groups = x_BGSK.shape[1]
    return x_BGSK if groups == heads else x_BGSK.repeat_interleave(heads // groups, dim=1)


def _summed(gradient_BHSK: Tensor, groups: int) -> Tensor:
    """Gradients of repeated key-value heads, summed over the repeats."""
    heads = gradient_BHSK.shape[1]
    if heads == groups:
        return gradient_BHSK
    summed: Tensor = gradient_BHSK.unflatten(1, (groups, heads // groups)).sum(2)
    return summed


def _forward(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(output, LSE), the LSE as the kernel's backward reads it."""
    _assert_layout(kernel, q, k, v)
    assert mask is None or not on_gpu(q), "CUDA's kernels are given no mask"
    out: Tensor
    lse: Tensor
    if not on_gpu(q):
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
    elif kernel == "flash":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    else:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
    return out, lse


def _backward(
    kernel: str,
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    full: AttentionBlock,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _assert_layout(kernel, q, k, v, gradient, full.out)
    # CUDA reads the LSE by pointer as packed [B, H, T], whatever its strides: a slice's would be
    # another head's. The CPU kernel honours strides, so that only GPUs would be wrong.
    assert full.lse.is_contiguous(), f"the LSE has strides {full.lse.stride()}"
    if not on_gpu(q):
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, full.out, full.lse, 0.0, causal, attn_mask=mask, scale=scale
        )
        return dq, dk, dv
    no_seed = torch.zeros(2, dtype=torch.int64, device=q.device)
    workspace = _rehearsed_workspace(kernel, q, k)
    if kernel == "flash":
        lengths = None, None, q.shape[2], k.shape[2]
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, *full, *lengths, 0.0, causal, no_seed, no_seed[0], scale=scale
        )
    else:
        wanted = [True, True, True, False]
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            gradient, q, k, v, None, *full, no_seed[0], no_seed[0], 0.0, wanted, causal, scale=scale
        )
    del workspace
    return dq, dk, dv


def _assert_layout(kernel: str, q: Tensor, *others: Tensor) -> None:
    """Assert what the kernel assumes of its operands."""
    strides = [x.stride(-1) for x in (q, *others)]
    assert set(strides) == {1}, f"the last strides are {strides}, not 1"
    assert all(x.dtype == q.dtype for x in others), [x.dtype for x in (q, *others)]
    if not on_gpu(q):
        return
    head_dim, size = q.shape[-1], q.element_size()
    multiple = 16 // size
    assert head_dim % multiple == 0, f"head_dim {head_dim} is no multiple of {multiple}"
    if kernel == "flash":
        assert size == 2, f"flash attention takes 16 bits, not {q.dtype}"
    else:
        assert others[0].shape[1] == q.shape[1], "efficient attention takes no grouped heads"


def _rehearsed_workspace(kernel: str, q: Tensor, k: Tensor) -> list[Tensor]:
    """In a rehearsal, what the GPU's backward allocates within itself; nothing otherwise.

    Both accumulate the queries' gradient in fp32 where that is not their dtype, and reduce rows of
    output x gradient. With grouped heads flash writes a gradient of keys and of values for every
    query head, and sums them afterwards (`flash_api.cpp`, `attention_backward.cu` of torch 2.13).
    """
    if q.device != REHEARSED_GPU:
        return []
    batch, heads, length, head_dim = q.shape
    rounded = -(-length // 128) * 128 if kernel == "flash" else length
    width = -(-head_dim // 32) * 32 if kernel == "flash" else head_dim
    made = [q.new_empty((batch, heads, rounded), dtype=torch.float32)]
    if q.element_size() == 2:
        made.append(q.new_empty((batch, rounded, heads, width), dtype=torch.float32))
    if k.shape[1] != heads:
        made += [q.new_empty((batch, k.shape[2], heads, head_dim)) for _ in range(2)]
    return made
