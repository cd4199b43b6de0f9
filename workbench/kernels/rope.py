"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) in place, pairing halves as Llama.

Forward overwrites queries and keys, which are outputs of a projection that nothing else reads, so
that it allocates nothing. Backward rotates the gradient back by the same angle into new tensors,
because a gradient may have other readers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.kernels.backends.compiled_reference import torch_compiled
from workbench.kernels.backends.kernel_launch import launch
from workbench.kernels.backends.operator_registration import fused_operator, register_fake
from workbench.kernels.backends.triton_compat import (
    accumulation_type,
    jit,
    next_power_of_2,
    runs_triton,
    tl,
)
from workbench.kernels.input_checks import check_shape, check_tensors, contiguous_like
from workbench.models.seams import at_least_fp32

TILE = 1024
"""Pairs per program, at least 16 bytes of each half per thread; wider heads use torch.compile."""


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys by plain operators, out of place."""
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = at_least_fp32(x).chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


# ---- Triton --------------------------------------------------------------------------------------


@jit
def rope_turn(  # type: ignore[no-untyped-def]
    Q,
    K,
    Q_OUT,
    K_OUT,
    COS,
    SIN,
    num_tokens,
    length,
    q_heads,
    k_heads,
    half,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    q_out_b,
    q_out_t,
    q_out_h,
    k_out_b,
    k_out_t,
    k_out_h,
    BACK: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A few tokens per program: their angles are loaded once for all heads of queries and keys."""
    row = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0) * TOKENS + row // HEADS
    b, t = (token // length).to(tl.int64), (token % length).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (token < num_tokens)[:, None] & (columns < half)
    cos = tl.load(COS + t[:, None] * half + columns, mask=inside, other=0.0).to(WIDE)
    sin = tl.load(SIN + t[:, None] * half + columns, mask=inside, other=0.0).to(WIDE)
    if BACK:
        sin = -sin
    for start in range(0, q_heads + k_heads, HEADS):
        head = (start + row % HEADS).to(tl.int64)
        here = inside & (head < q_heads + k_heads)[:, None]
        x = tl.where(
            head < q_heads,
            Q + b * q_b + t * q_t + head * q_h,
            K + b * k_b + t * k_t + (head - q_heads) * k_h,
        )
        y = tl.where(
            head < q_heads,
            Q_OUT + b * q_out_b + t * q_out_t + head * q_out_h,
            K_OUT + b * k_out_b + t * k_out_t + (head - q_heads) * k_out_h,
        )
        x, y = x[:, None] + columns, y[:, None] + columns
        # Both halves are here before either is written, for y may be x.
        first = tl.load(x, mask=here, other=0.0).to(WIDE)
        second = tl.load(x + half, mask=here, other=0.0).to(WIDE)
        tl.store(y, (first * cos - second * sin).to(Q_OUT.dtype.element_ty), mask=here)
        tl.store(y + half, (second * cos + first * sin).to(Q_OUT.dtype.element_ty), mask=here)


def _launch(
    x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, back: bool
) -> None:
    """Rotate the queries and keys of `x` into those of `y`, which may be the same."""
    q, k, half = *x, cos.shape[-1]
    if q.numel() + k.numel() == 0:
        return
    block, num_heads, num_tokens = (
        next_power_of_2(half),
        q.shape[2] + k.shape[2],
        q.shape[0] * q.shape[1],
    )
    heads = min(next_power_of_2(num_heads), TILE // block)
    tokens = TILE // block // heads
    sizes = num_tokens, q.shape[1], q.shape[2], k.shape[2], half
    strides = (step for each in (q, k, *y) for step in each.stride()[:3])
    launch(
        rope_turn,
        -(-num_tokens // tokens),
        (q, k, *y, cos.contiguous(), sin.contiguous()),
        (*sizes, *strides),
        BACK=back,
        WIDE=accumulation_type(q, cos),
        TOKENS=tokens,
        HEADS=heads,
        BLOCK=block,
        num_warps=4,
    )


# ---- without Triton: the same by a compiler ------------------------------------------------------


@torch_compiled
def _fresh(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    return reference(q, k, cos, -sin if back else sin)


# ---- the operator --------------------------------------------------------------------------------


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, kernels: str = "fused"
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys in place, differentiably.

    `q` and `k` are overwritten: only the results may be used afterwards, and where autograd has
    saved them its backward raises, as for any in-place operator.

    Args:
        q: Queries [B, T, H, K]. Tokens and heads may have any strides, as slices of a fused QKV
            projection have (autograd forbids overwriting outputs of `split`); heads that are not
            contiguous, or overlapping tensors, are copied.
        k: Keys [B, T, Hk, K].
        cos: [T, K / 2].
        sin: [T, K / 2].
        kernels: compiled, or fused: Triton where it runs.

    Returns:
        (queries, keys), rotated.

    Raises:
        ValueError: Names the tensor of an unsupported device, dtype or shape, a leaf that requires
            a gradient, or a table that does.
    """
    _check(q, k, cos, sin)
    turned: tuple[Tensor, Tensor] = _Rope.apply(q, k, cos, sin, kernels)
    return turned


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_tensors("rope", "q", q=q, k=k, cos=cos, sin=sin)
    for name, x in (("q", q), ("k", k)):
        if x.ndim != 4 or x.shape[-1] % 2:
            raise ValueError(
                f"rope: {name} has shape {tuple(x.shape)}; legal: [B, T, heads, an even head_dim]"
            )
        if torch.is_grad_enabled() and x.requires_grad and x.is_leaf:
            raise ValueError(
                f"rope: {name} is a leaf that requires a gradient; legal: the result of an operator"
            )
    if k.dtype != q.dtype or not q.is_floating_point():
        raise ValueError(f"rope: q is {q.dtype}, k is {k.dtype}; legal: one floating dtype")
    check_shape("rope", "k", k, (*q.shape[:2], k.shape[2], q.shape[3]))
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape("rope", name, table, (q.shape[1], q.shape[3] // 2))
        if table.requires_grad:
            raise ValueError(f"rope: {name} requires a gradient; legal: a constant table")


class _Rope(torch.autograd.Function):
    """In-place rotation whose results alias the inputs.

    The aliases share the inputs' version counter, so that autograd detects a saved input that was
    overwritten. `mark_dirty` is not used: for views, which heads are, autograd's backward would
    then copy the full gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, kernels: str
    ) -> tuple[Tensor, Tensor]:
        q, k = _writable(q.detach()), _writable(k.detach())
        k = k if _apart(q, k) else k.clone(memory_format=torch.contiguous_format)
        rope_op(q, k, cos, sin, kernels)
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        return q, k

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *_turned_back(dq, dk, cos, sin, True, ctx.kernels), None, None, None


class _Turned(torch.autograd.Function):
    """Out-of-place rotation, whose gradient is the rotation in the other direction."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool, kernels: str
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.back, ctx.kernels = back, kernels
        turned: tuple[Tensor, Tensor] = turned_op(q, k, cos, sin, back, kernels)
        return turned

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *_turned_back(dq, dk, cos, sin, not ctx.back, ctx.kernels), *[None] * 4


def _turned_back(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, back: bool, kernels: str
) -> tuple[Tensor, Tensor]:
    """Gradients rotated; differentiable if autograd asks for it."""
    rotate = _Turned.apply if torch.is_grad_enabled() else turned_op
    turned: tuple[Tensor, Tensor] = rotate(dq, dk, cos, sin, back, kernels)
    return turned


def _writable(x: Tensor) -> Tensor:
    """`x`, or a copy where its heads are not contiguous or its entries overlap."""
    if x.is_contiguous():
        return x
    reach = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1
    ):
        if stride < reach:
            return x.clone(memory_format=torch.contiguous_format)
        reach += stride * (size - 1)
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _apart(q: Tensor, k: Tensor) -> bool:
    """Whether q and k do not overlap: in one storage, each token's queries are before its keys or
    after them.
    """
    if q.untyped_storage() is not k.untyped_storage():
        return True
    spans = [
        (x.storage_offset(), x.storage_offset() + (x.shape[2] - 1) * x.stride(2) + x.shape[3])
        for x in (q, k)
    ]
    (start, end), (next_start, next_end) = sorted(spans)
    steps = [(q.stride(dim), k.stride(dim)) for dim in (0, 1) if q.shape[dim] > 1]
    return end <= next_start and all(step == other >= next_end - start for step, other in steps)


@fused_operator("rope_", mutates_args=("q", "k"))
def rope_op(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, kernels: str) -> None:
    """Rotate `q` and `k` in place; their heads are contiguous."""
    if not _by_compiler(q, k, cos, kernels):
        return _launch((q, k), (q, k), cos, sin, back=False)
    # Compiled code must not write to two arguments of one storage: rotate out of place, copy back.
    for x, turned in zip((q, k), _fresh(q, k, cos, sin, False), strict=True):
        x.copy_(turned)


@register_fake(rope_op)
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, kernels: str) -> None:
    return None


@fused_operator("rope_turned")
def turned_op(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool, kernels: str
) -> tuple[Tensor, Tensor]:
    """Rotate both, `back` for the inverse, into new contiguous tensors."""
    if _by_compiler(q, k, cos, kernels):
        # Gradients come in the layouts of several attention kernels; code is compiled for one.
        q, k = _fresh(q.contiguous(), k.contiguous(), cos, sin, back)
        return q.contiguous(), k.contiguous()
    fresh = contiguous_like(q), contiguous_like(k)
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    _launch((q, k), fresh, cos, sin, back)
    return fresh


@register_fake(turned_op)
def _(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool, kernels: str
) -> tuple[Tensor, Tensor]:
    return contiguous_like(q), contiguous_like(k)


def _by_compiler(q: Tensor, k: Tensor, cos: Tensor, kernels: str) -> bool:
    triton = kernels == "fused" and runs_triton(cos.device) and cos.shape[-1] <= TILE
    return not triton and q.numel() + k.numel() > 0
