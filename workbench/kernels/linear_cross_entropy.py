"""Fused linear cross entropy: output projection and loss in chunks of tokens.

The full logits [N, V] never exist. Gradients are computed in forward, chunk by chunk, while the
logits of the chunk exist (as in Liger Kernel, Hsu et al. 2024, arXiv 2410.10989): those of the
input [N, D] and the weight [V, D] are kept for backward, which multiplies them by the incoming
gradient. The weight gradient is accumulated in its own dtype, so it is rounded once per chunk, of
which there are few (`loss_chunk_tokens`), and bf16 needs no second copy in fp32.

In fp16 both are kept in fp32, and computed from logit gradients multiplied by `gradient_scale`: the
loss scale arrives only with the incoming gradient, without it small values would underflow, and
sums of large ones would overflow at any scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from workbench.kernels import cross_entropy as ce
from workbench.kernels.backends.operator_registration import fused_operator, register_fake
from workbench.kernels.backends.triton_compat import accumulation_type, jit, runs_triton, tl
from workbench.kernels.cross_entropy import (
    check_tokens,
    gradient_scale,
    statistics_of,
    tile_shape,
    write_gradient,
)
from workbench.kernels.input_checks import accumulation_dtype, check_tensors
from workbench.models.attention.soft_cap import soft_cap_
from workbench.models.gemm_into import multiply_into
from workbench.models.seams import IGNORE_INDEX, Reduction, sum_token_losses
from workbench.runtime_facts.loss_chunks import loss_chunk_columns, loss_chunk_tokens

TILE_NUMEL = 16384
"""Entries of a row per tile: few rows at a time, which stay in the cache until read again."""


def reference(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, smoothing: float = 0.0, z: float = 0.0
) -> Tensor:
    """The loss, summed over valid tokens, by plain operators."""
    return ce.reference(F.linear(x_ND, weight_VD), targets_N, smoothing, z)


# ---- Triton --------------------------------------------------------------------------------------


@jit
def cross_entropy_both(  # type: ignore[no-untyped-def]
    LOGITS,
    TARGETS,
    LOSS,
    num_rows,
    stride,
    num_columns,
    num_real,
    ignore,
    SMOOTHING: tl.constexpr,
    SHARE: tl.constexpr,
    Z: tl.constexpr,
    HELD: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Loss per token, and the gradient over its logits, which are reloaded from the cache."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = rows < num_rows
    targets = tl.load(TARGETS + rows, mask=inside, other=ignore)
    here = targets != ignore
    top, exps, target, total = statistics_of(
        LOGITS + rows * stride,
        here,
        targets,
        num_columns,
        num_real,
        SMOOTHING > 0.0,
        WIDE,
        ROWS,
        BLOCK,
    )
    log = tl.log(exps)
    known = (targets >= 0) & (targets < num_real)
    lse = tl.where(known, top + log, float("nan"))
    loss = log - (1.0 - SMOOTHING) * (target - top) + Z * lse * lse
    if SMOOTHING > 0.0:
        loss -= SHARE * total - SMOOTHING * top
    tl.store(LOSS + rows, tl.where(here, tl.where(known, loss, float("nan")), 0.0), mask=inside)
    tl.debug_barrier()  # no thread may overwrite an entry that another has yet to read
    write_gradient(
        LOGITS + rows * stride,
        inside,
        here,
        targets,
        lse,
        HELD,
        num_columns,
        num_real,
        SMOOTHING,
        SHARE,
        Z,
        WIDE,
        BLOCK,
    )


# ---- a run of tokens -----------------------------------------------------------------------------


@fused_operator(
    "linear_cross_entropy_run", mutates_args=("logits_buffer", "dx_ND", "dw_VD", "derivative")
)
def chunk_op(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    logits_buffer: Tensor,
    dx_ND: Tensor | None,
    dw_VD: Tensor | None,
    first: bool,
    smoothing: float,
    z: float,
    kernels: str,
    softcap: float = 0.0,
    derivative: Tensor | None = None,
    token_factor_N: Tensor | None = None,
) -> Tensor:
    """Loss per token [N] of one chunk.

    The logits are computed in the buffer `logits_buffer`; from their gradient, if requested, the
    input gradient is written, and the weight gradient written by the `first` chunk and added by
    others. `softcap` bounds the logits, whose buffer `derivative` it needs; 0: none.
    `token_factor_N` multiplies each token's gradient.
    """
    num_real = len(weight_VD)
    logits_NV = logits_buffer[: len(x_ND)]
    torch.mm(x_ND, weight_VD.t(), out=logits_NV[:, :num_real])
    if derivative is not None:
        derivative = derivative[: len(x_ND)]
        soft_cap_(logits_NV[:, :num_real], softcap, derivative)
    if dx_ND is None and dw_VD is None:
        return _losses(logits_NV, targets_N, num_real, smoothing, z, kernels)[0]
    loss_N = _both(logits_NV, targets_N, num_real, smoothing, z, kernels)
    if derivative is not None:
        logits_NV[:, :num_real].mul_(derivative)
    if token_factor_N is not None:
        logits_NV.mul_(token_factor_N[:, None])
    if dx_ND is not None:
        multiply_into(dx_ND, logits_NV[:, :num_real], weight_VD, True)
    if dw_VD is not None:
        multiply_into(dw_VD, logits_NV[:, :num_real].t(), x_ND, first)
    return loss_N


@register_fake(chunk_op)
def _(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    logits_buffer: Tensor,
    dx_ND: Tensor | None,
    dw_VD: Tensor | None,
    first: bool,
    smoothing: float,
    z: float,
    kernels: str,
    softcap: float = 0.0,
    derivative: Tensor | None = None,
    token_factor_N: Tensor | None = None,
) -> Tensor:
    return torch.empty(len(x_ND), dtype=accumulation_dtype(x_ND), device=x_ND.device)


def _losses(
    logits_NV: Tensor, targets_N: Tensor, num_real: int, smoothing: float, z: float, kernels: str
) -> tuple[Tensor, Tensor]:
    found = ce.statistics_op(logits_NV, targets_N, 0, num_real, smoothing > 0, kernels)
    return ce.unsharded_losses(found, targets_N, (0, num_real), smoothing, smoothing / num_real, z)


def _both(
    logits_NV: Tensor, targets_N: Tensor, num_real: int, smoothing: float, z: float, kernels: str
) -> Tensor:
    share, factor = smoothing / num_real, gradient_scale(logits_NV.dtype, z)
    if kernels != "fused" or not runs_triton(logits_NV.device):
        loss_N, lse_N = _losses(logits_NV, targets_N, num_real, smoothing, z, kernels)
        ce.write(logits_NV, targets_N, lse_N, factor, 0, num_real, smoothing, share, z)
        return loss_N
    loss_N = torch.empty(
        len(logits_NV), dtype=accumulation_dtype(logits_NV), device=logits_NV.device
    )
    shape = tile_shape(logits_NV.shape[1], TILE_NUMEL if logits_NV.element_size() < 8 else ce.BLOCK)
    cross_entropy_both[(-(-len(logits_NV) // shape["ROWS"]),)](
        logits_NV,
        targets_N,
        loss_N,
        len(logits_NV),
        logits_NV.stride(0),
        logits_NV.shape[1],
        num_real,
        IGNORE_INDEX,
        SMOOTHING=smoothing,
        SHARE=share,
        Z=z,
        HELD=factor,
        WIDE=accumulation_type(logits_NV),
        **shape,
    )
    return loss_N


# ---- the operator for autograd -------------------------------------------------------------------


def linear_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    smoothing: float = 0.0,
    z: float = 0.0,
    kernels: str = "fused",
    softcap: float | None = None,
    reduction: Reduction = "sum",
) -> Tensor:
    """Cross entropy of x W^T, summed over valid tokens, in fp32 or better: a scalar; without
    reduction [N].

    `softcap` bounds the logits by softcap tanh(logit / softcap).
    Without reduction, backward computes the logits again, chunk by chunk: a token's factor is known
    only then. Else gradients are computed in forward, only where `x_ND` [N, D] or `weight_VD`
    [V, D] require them. Backward can then run once, because it overwrites them; a second time
    autograd raises. A target outside the vocabulary makes the loss and the gradients NaN. Does not
    synchronise with the device.

    Raises:
        ValueError: Names the unsupported argument.
    """
    check_tokens("linear_cross_entropy", "x", x_ND, targets_N, smoothing, z)
    check_tensors("linear_cross_entropy", "x", x=x_ND, weight=weight_VD)
    fits = weight_VD.ndim == 2 and weight_VD.shape[1] == x_ND.shape[1] and len(weight_VD) > 0
    if not fits or weight_VD.dtype != x_ND.dtype:
        raise ValueError(
            f"linear_cross_entropy: weight is {weight_VD.dtype} of shape {tuple(weight_VD.shape)}; "
            f"legal: {x_ND.dtype} of shape (vocabulary, {x_ND.shape[1]})"
        )
    operands = x_ND.contiguous(), weight_VD.contiguous(), targets_N.contiguous()
    options = smoothing, z, kernels, softcap or 0.0
    if reduction == "none":
        losses: Tensor = _TokenLosses.apply(*operands, *options)
        return losses
    loss: Tensor = _LinearCrossEntropy.apply(*operands, *options, torch.is_grad_enabled())
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes loss and gradients in forward; saves the gradients, not the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        smoothing: float,
        z: float,
        kernels: str,
        softcap: float,
        backward: bool,
    ) -> Tensor:
        asked = [backward and need for need in ctx.needs_input_grad[:2]]
        gradients = _gradient_buffers(x_ND, weight_VD, asked)
        options = smoothing, z, kernels, softcap
        total = torch.zeros((), dtype=accumulation_dtype(x_ND), device=x_ND.device)
        for losses in _chunks(x_ND, weight_VD, targets_N, gradients, options):
            total += sum_token_losses(losses)
        ctx.save_for_backward(*gradients)
        ctx.dtype, ctx.gradient_scale = x_ND.dtype, gradient_scale(x_ND.dtype, z)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # `mul_` in place advances the version counter: a second backward raises.
        made = (
            _scaled(kept, gradient / ctx.gradient_scale, ctx.dtype) for kept in ctx.saved_tensors
        )
        return *made, *[None] * 6


class _TokenLosses(torch.autograd.Function):
    """Loss of each token; backward computes the logits of each chunk again, for its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        smoothing: float,
        z: float,
        kernels: str,
        softcap: float,
    ) -> Tensor:
        ctx.save_for_backward(x_ND, weight_VD, targets_N)
        ctx.options = smoothing, z, kernels, softcap
        losses = list(_chunks(x_ND, weight_VD, targets_N, (None, None), ctx.options))
        return torch.cat(losses) if losses else x_ND.new_zeros(0, dtype=accumulation_dtype(x_ND))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_VD, targets_N = ctx.saved_tensors
        gradients = _gradient_buffers(x_ND, weight_VD, ctx.needs_input_grad[:2])
        factor_N = gradient_N / gradient_scale(x_ND.dtype, ctx.options[1])
        for _ in _chunks(x_ND, weight_VD, targets_N, gradients, ctx.options, factor_N):
            pass
        return *(g if g is None else g.to(x_ND.dtype) for g in gradients), *[None] * 5


Buffers = tuple[Tensor | None, Tensor | None]


def _gradient_buffers(x_ND: Tensor, weight_VD: Tensor, asked: Sequence[bool]) -> Buffers:
    """Of the input's and of the weight's gradient, where `asked`; in fp32 where they have fp16."""
    dtype = torch.float32 if x_ND.dtype == torch.float16 else x_ND.dtype
    dx_ND, dw_VD = (
        torch.empty_like(t, dtype=dtype) if need else None
        for t, need in zip((x_ND, weight_VD), asked, strict=True)
    )
    if dw_VD is not None and not len(x_ND):  # the first chunk writes it, but there is none
        dw_VD.zero_()
    return dx_ND, dw_VD


def _chunks(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    gradients: Buffers,
    options: tuple[float, float, str, float],
    token_factor_N: Tensor | None = None,
) -> Iterator[Tensor]:
    """Losses of each chunk of tokens, once its gradients are written.

    Args:
        gradients: Of input and weight, written where not None.
        options: Smoothing, z, kernels and softcap.
        token_factor_N: Factor of each token's gradient.
    """
    (n, d), v = x_ND.shape, len(weight_VD)
    step = loss_chunk_tokens(n, d, v)
    dx_ND, dw_VD = gradients
    # One buffer serves the logits of all chunks, and their gradients.
    logits_buffer = x_ND.new_empty(step, loss_chunk_columns(v))
    derivative = x_ND.new_empty(step, v) if options[-1] else None
    for at in range(0, n, max(1, step)):
        here = slice(at, at + step)
        yield chunk_op(
            x_ND[here],
            weight_VD,
            targets_N[here],
            logits_buffer,
            None if dx_ND is None else dx_ND[here],
            dw_VD,
            at == 0,
            *options,
            derivative,
            None if token_factor_N is None else token_factor_N[here],
        )


def _scaled(kept: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A gradient kept by forward times `factor`: in place, or cast to `dtype`."""
    if kept is None:
        return None
    if kept.dtype == dtype:
        return kept.mul_(factor)
    return torch.mul(kept, factor, out=torch.empty_like(kept, dtype=dtype))
