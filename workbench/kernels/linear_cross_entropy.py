"""Output projection and summed cross entropy as one: logits are made for a run of tokens at a time,
and never held.

The gradients are made in forward, run by run, while the logits are there (as in Liger Kernel, Hsu
et al. 2024, 2410.10989): the input's [N, D] and the weight's [V, D] are kept until backward, which
multiplies them by what comes in. The weight's is summed over runs in its own dtype and so rounded
once a run, of which there are few (`loss_chunk_tokens`): bf16 thus holds no second copy in fp32. In
fp16 both are kept in fp32, made from a gradient of the logits that is multiplied by `held`: what
will come in has the loss's scale in it, without which small ones would be lost, and sums of large
ones overflow whatever that scale is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import custom_op

from workbench.kernels import cross_entropy as ce
from workbench.kernels.backends.triton_compat import jit, runs_triton, tl, wide
from workbench.kernels.cross_entropy import check_tokens, statistics_of, tile, write_gradient
from workbench.kernels.input_checks import check, wide_dtype
from workbench.models.seams import IGNORE_INDEX
from workbench.runtime_facts.loss_chunks import loss_chunk_columns, loss_chunk_tokens

ENTRIES = 16384
"""Of a row, which a program takes at once: few rows at a time, so that all stay in the cache until
read again.
"""
PIECE = 2**22
"""Entries that are widened at a time where no product takes narrow factors to a wide result."""


def reference(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, smoothing: float = 0.0, z: float = 0.0
) -> Tensor:
    """The sum over valid tokens as plain operators."""
    return ce.reference(F.linear(x_ND, weight_VD), targets_N, smoothing, z)


def held(dtype: torch.dtype, z: float) -> float:
    """What gradients made in forward are multiplied by; a power of two, and no logit's reaches
    fp16's end by it.
    """
    return 1.0 if dtype != torch.float16 else 2.0**10 if z else 2.0**15


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
    """Each token's loss, and its gradient in place of its logits, which are read again from the
    cache.
    """
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
    tl.debug_barrier()  # no thread may write an entry that another has still to read
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


@custom_op("workbench::linear_cross_entropy_run", mutates_args=("room", "dx_ND", "dw_VD"))
def run_op(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    room: Tensor,
    dx_ND: Tensor | None,
    dw_VD: Tensor | None,
    first: bool,
    smoothing: float,
    z: float,
    kernels: str,
) -> Tensor:
    """Each token's loss [N]; the logits are made in `room`, and from their gradient, if asked for,
    the input's is written and the weight's written by the `first` run, added by others.
    """
    num_real = len(weight_VD)
    logits_NV = room[: len(x_ND)]
    torch.mm(x_ND, weight_VD.t(), out=logits_NV[:, :num_real])
    if dx_ND is None and dw_VD is None:
        return _losses(logits_NV, targets_N, num_real, smoothing, z, kernels)[0]
    loss_N = _both(logits_NV, targets_N, num_real, smoothing, z, kernels)
    if dx_ND is not None:
        _multiply(dx_ND, logits_NV[:, :num_real], weight_VD, True)
    if dw_VD is not None:
        _multiply(dw_VD, logits_NV[:, :num_real].t(), x_ND, first)
    return loss_N


@run_op.register_fake
def _(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    room: Tensor,
    dx_ND: Tensor | None,
    dw_VD: Tensor | None,
    first: bool,
    smoothing: float,
    z: float,
    kernels: str,
) -> Tensor:
    return torch.empty(len(x_ND), dtype=wide_dtype(x_ND), device=x_ND.device)


def _losses(
    logits_NV: Tensor, targets_N: Tensor, num_real: int, smoothing: float, z: float, kernels: str
) -> tuple[Tensor, Tensor]:
    found = ce.statistics_op(logits_NV, targets_N, 0, num_real, smoothing > 0, kernels)
    return ce.whole_losses(found, targets_N, (0, num_real), smoothing, smoothing / num_real, z)


def _both(
    logits_NV: Tensor, targets_N: Tensor, num_real: int, smoothing: float, z: float, kernels: str
) -> Tensor:
    share, factor = smoothing / num_real, held(logits_NV.dtype, z)
    if kernels != "fused" or not runs_triton(logits_NV.device):
        loss_N, lse_N = _losses(logits_NV, targets_N, num_real, smoothing, z, kernels)
        ce.write(logits_NV, targets_N, lse_N, factor, 0, num_real, smoothing, share, z)
        return loss_N
    loss_N = torch.empty(len(logits_NV), dtype=wide_dtype(logits_NV), device=logits_NV.device)
    shape = tile(logits_NV.shape[1], ENTRIES if logits_NV.element_size() < 8 else ce.BLOCK)
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
        WIDE=wide(logits_NV),
        **shape,
    )
    return loss_N


def _multiply(out: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """out = a b, or where not `first` out += a b; `out` may be wider than its factors."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out) if first else out.addmm_(a, b)
    elif out.is_cuda:
        torch.addmm(out, a, b, beta=0 if first else 1, out_dtype=out.dtype, out=out)
    else:  # torch has that product on CUDA alone
        step = max(1, PIECE // max(*out.shape, 1))
        for at in range(0, len(b), step):
            out.addmm_(
                a[:, at : at + step].to(out.dtype),
                b[at : at + step].to(out.dtype),
                beta=float(at or not first),
            )


# ---- the operator for autograd -------------------------------------------------------------------


def linear_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    smoothing: float = 0.0,
    z: float = 0.0,
    kernels: str = "fused",
) -> Tensor:
    """Sum over valid tokens of the cross entropy of x W^T, in fp32 or better; a scalar.

    Where neither `x_ND` nor `weight_VD` wants a gradient none is made. Backward runs once: it uses
    up what forward has kept, and autograd tells who runs it again. A target outside the vocabulary
    makes the loss and the gradients NaN; nothing waits for the device. Raises ValueError naming
    what is not right.
    """
    check_tokens("linear_cross_entropy", "x", x_ND, targets_N, smoothing, z)
    check("linear_cross_entropy", "x", x=x_ND, weight=weight_VD)
    fits = weight_VD.ndim == 2 and weight_VD.shape[1] == x_ND.shape[1] and len(weight_VD) > 0
    if not fits or weight_VD.dtype != x_ND.dtype:
        raise ValueError(
            f"linear_cross_entropy: weight is {weight_VD.dtype} of shape {tuple(weight_VD.shape)}; "
            f"legal: {x_ND.dtype} of shape (vocabulary, {x_ND.shape[1]})"
        )
    loss: Tensor = _LinearCrossEntropy.apply(
        x_ND.contiguous(),
        weight_VD.contiguous(),
        targets_N.contiguous(),
        smoothing,
        z,
        kernels,
        torch.is_grad_enabled(),
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        smoothing: float,
        z: float,
        kernels: str,
        backward: bool,
    ) -> Tensor:
        (n, d), v = x_ND.shape, len(weight_VD)
        step = loss_chunk_tokens(n, d, v)
        dtype = torch.float32 if x_ND.dtype == torch.float16 else x_ND.dtype
        asked = [backward and need for need in ctx.needs_input_grad[:2]]
        dx_ND, dw_VD = (
            torch.empty_like(t, dtype=dtype) if need else None
            for t, need in zip((x_ND, weight_VD), asked, strict=True)
        )
        room, total = (
            x_ND.new_empty(step, loss_chunk_columns(v)),
            torch.zeros((), dtype=wide_dtype(x_ND), device=x_ND.device),
        )
        for at in range(0, n, max(1, step)):
            here = slice(at, at + step)
            total += run_op(
                x_ND[here],
                weight_VD,
                targets_N[here],
                room,
                None if dx_ND is None else dx_ND[here],
                dw_VD,
                at == 0,
                smoothing,
                z,
                kernels,
            ).sum()
        if dw_VD is not None and not n:
            dw_VD.zero_()
        ctx.save_for_backward(dx_ND, dw_VD)
        ctx.dtype, ctx.held = x_ND.dtype, held(x_ND.dtype, z)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        made = (_scaled(kept, gradient / ctx.held, ctx.dtype) for kept in ctx.saved_tensors)
        return *made, *[None] * 5


def _scaled(kept: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """What forward has kept, times `factor`: in its place, or narrowed."""
    if kept is None:
        return None
    if kept.dtype == dtype:
        return kept.mul_(factor)
    return torch.mul(kept, factor, out=torch.empty_like(kept, dtype=dtype))
