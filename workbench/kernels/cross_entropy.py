"""Fused vocabulary-parallel cross entropy, whose gradient overwrites the logits.

With label smoothing (Szegedy et al. 2016, arXiv 1512.00567) and the z-loss, z times the squared log
of the softmax denominator (Chowdhery et al. 2022, arXiv 2204.02311).

Forward reads the logits once for a few statistics per token (online softmax, Milakov and Gimelshein
2018, arXiv 1805.02867). Backward reads them again and writes the gradient over them: no other
tensor of the vocabulary's width exists, and the gradient is rounded once, after multiplication by
the incoming gradient, as fp16 needs. With a sharded vocabulary the caller's collectives reduce the
statistics. All arithmetic is in fp32 or better.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from workbench.kernels.backends.compiled_reference import torch_compiled
from workbench.kernels.backends.operator_registration import fused_operator, register_fake
from workbench.kernels.backends.triton_compat import (
    accumulation_type,
    jit,
    next_power_of_2,
    runs_triton,
    tl,
)
from workbench.kernels.input_checks import accumulation_dtype, check_shape, check_tensors
from workbench.models.seams import IGNORE_INDEX, Reduction, at_least_fp32, sum_token_losses

BLOCK = 2048
"""Entries per tile of a small program: many programs per multiprocessor hide latency."""

Reduce = Callable[[Tensor], Tensor]
"""A reduction over ranks of a contiguous tensor, in place."""


def reference(
    logits_NV: Tensor, targets_N: Tensor, smoothing: float = 0.0, z: float = 0.0
) -> Tensor:
    """The loss, summed over valid tokens, by plain operators."""
    own = at_least_fp32(logits_NV)
    loss = F.cross_entropy(
        own, targets_N, reduction="sum", ignore_index=IGNORE_INDEX, label_smoothing=smoothing
    )
    return loss + z * own.logsumexp(-1)[targets_N != IGNORE_INDEX].square().sum() if z else loss


# ---- Triton --------------------------------------------------------------------------------------


@jit
def load(ROWS_AT, columns, here, num_columns, num_real, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a block of logits, -inf in padding, which is loaded too: the mask stays aligned."""
    x = tl.load(ROWS_AT + columns, mask=here & (columns < num_columns), other=float("-inf")).to(
        WIDE
    )
    return tl.where(columns < num_real, x, float("-inf"))


@jit
def statistics_of(  # type: ignore[no-untyped-def]
    ROWS_AT,
    here,
    local,
    num_columns,
    num_real,
    SMOOTHED: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Statistics of rows, [ROWS, 1] each: maximum, sum of exponentials relative to it, the target's
    logit (0 if elsewhere), and with smoothing the sum of logits.
    """
    mine = here & (local >= 0) & (local < num_real)
    target = tl.load(ROWS_AT + local, mask=mine, other=0.0).to(WIDE)
    top = tl.full((ROWS, 1), float("-inf"), WIDE)
    total = tl.zeros((ROWS, 1), WIDE)
    exps = tl.zeros((ROWS, BLOCK), WIDE)
    for first in range(0, num_real, BLOCK):
        columns = first + tl.arange(0, BLOCK)[None, :]
        x = load(ROWS_AT, columns, here, num_columns, num_real, WIDE)
        if SMOOTHED:
            total += tl.sum(tl.where(here & (columns < num_real), x, 0.0), 1)[:, None]
        higher = tl.maximum(top, tl.max(x, 1)[:, None])
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf less -inf would be no number
        exps = exps * tl.exp(top - shift) + tl.exp(x - shift)
        top = higher
    return top, tl.sum(exps, 1)[:, None], target, total


@jit
def write_gradient(  # type: ignore[no-untyped-def]
    ROWS_AT,
    inside,
    here,
    local,
    lse,
    factor,
    num_columns,
    num_real,
    SMOOTHING: tl.constexpr,
    SHARE: tl.constexpr,
    Z: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient over the logits; zero for ignored tokens and padding."""
    weight = 1.0 + 2.0 * Z * lse
    for first in range(0, num_columns, BLOCK):
        columns = first + tl.arange(0, BLOCK)[None, :]
        made = tl.exp(load(ROWS_AT, columns, here, num_columns, num_real, WIDE) - lse) * weight
        made = (tl.where(columns == local, made - (1.0 - SMOOTHING), made) - SHARE) * factor
        made = tl.where(here & (columns < num_real), made, 0.0).to(ROWS_AT.dtype.element_ty)
        tl.store(ROWS_AT + columns, made, mask=inside & (columns < num_columns))


@jit
def cross_entropy_statistics(  # type: ignore[no-untyped-def]
    LOGITS,
    TARGETS,
    OUT,
    num_rows,
    stride,
    num_columns,
    num_real,
    start,
    ignore,
    SMOOTHED: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A few rows per program; rows of ignored tokens are not read."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = rows < num_rows
    targets = tl.load(TARGETS + rows, mask=inside, other=ignore)
    top, exps, target, total = statistics_of(
        LOGITS + rows * stride,
        targets != ignore,
        targets - start,
        num_columns,
        num_real,
        SMOOTHED,
        WIDE,
        ROWS,
        BLOCK,
    )
    tl.store(OUT + rows, top, mask=inside)
    tl.store(OUT + num_rows + rows, exps, mask=inside)
    tl.store(OUT + 2 * num_rows + rows, target, mask=inside)
    if SMOOTHED:
        tl.store(OUT + 3 * num_rows + rows, total, mask=inside)


@jit
def cross_entropy_gradient(  # type: ignore[no-untyped-def]
    LOGITS,
    TARGETS,
    LSE,
    FACTOR,
    num_rows,
    stride,
    num_columns,
    num_real,
    start,
    ignore,
    SMOOTHING: tl.constexpr,
    SHARE: tl.constexpr,
    Z: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Overwrite the logits by their gradient, times the incoming gradient."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = rows < num_rows
    targets = tl.load(TARGETS + rows, mask=inside, other=ignore)
    lse = tl.load(LSE + rows, mask=inside, other=0.0)
    write_gradient(
        LOGITS + rows * stride,
        inside,
        targets != ignore,
        targets - start,
        lse,
        tl.load(FACTOR).to(WIDE),
        num_columns,
        num_real,
        SMOOTHING,
        SHARE,
        Z,
        WIDE,
        BLOCK,
    )


# ---- without Triton: the same by a compiler, which on the CPU too holds no more than a row in fp32


@torch_compiled
def _statistics(logits_NV: Tensor, local_N: Tensor, smoothed: bool) -> Tensor:
    own = at_least_fp32(logits_NV)
    top = own.amax(-1)
    shift = top.masked_fill(top == -torch.inf, 0.0)
    mine = (local_N >= 0) & (local_N < own.shape[1])
    target = own.gather(1, local_N.clamp(0, own.shape[1] - 1)[:, None])[:, 0].masked_fill(
        ~mine, 0.0
    )
    rest = (own.sum(-1),) if smoothed else ()
    return torch.stack((top, (own - shift[:, None]).exp().sum(-1), target, *rest))


@torch_compiled
def _gradient(
    logits_NV: Tensor,
    local_N: Tensor,
    here_N: Tensor,
    lse_N: Tensor,
    factor: Tensor | float,
    smoothing: float,
    share: float,
    z: float,
) -> None:
    made = (at_least_fp32(logits_NV) - lse_N[:, None]).exp()
    made = made * (1 + 2 * z * lse_N)[:, None] if z else made
    hit = torch.arange(made.shape[1], device=made.device) == local_N[:, None]
    made = (torch.where(hit, made - (1 - smoothing), made) - share) * factor
    logits_NV.copy_(made.masked_fill(~here_N[:, None], 0.0))


# ---- the operators -------------------------------------------------------------------------------


@fused_operator("cross_entropy_statistics")
def statistics_op(
    logits_NV: Tensor, targets_N: Tensor, start: int, stop: int, smoothed: bool, kernels: str
) -> Tensor:
    """Statistics [3 or 4, N], in fp32 or better, of the local entries [start, stop) of the
    vocabulary.

    Per token: maximum, sum of exponentials relative to it, the target's logit (0 if it is on
    another rank), and with `smoothed` the sum of logits.
    """
    num_real = stop - start
    if not num_real or not len(logits_NV):
        out = _room(logits_NV, smoothed).zero_()
        out[0] = -torch.inf
        return out
    if not _triton(logits_NV, kernels):
        return _statistics(logits_NV[:, :num_real], targets_N - start, smoothed)
    out = _room(logits_NV, smoothed)
    shape = tile_shape(logits_NV.shape[1], BLOCK)
    cross_entropy_statistics[(-(-len(logits_NV) // shape["ROWS"]),)](
        logits_NV,
        targets_N,
        out,
        len(logits_NV),
        logits_NV.stride(0),
        logits_NV.shape[1],
        num_real,
        start,
        IGNORE_INDEX,
        SMOOTHED=smoothed,
        WIDE=accumulation_type(logits_NV),
        **shape,
    )
    return out


@register_fake(statistics_op)
def _(
    logits_NV: Tensor, targets_N: Tensor, start: int, stop: int, smoothed: bool, kernels: str
) -> Tensor:
    return _room(logits_NV, smoothed)


def _room(logits_NV: Tensor, smoothed: bool) -> Tensor:
    return torch.empty(
        3 + smoothed, len(logits_NV), dtype=accumulation_dtype(logits_NV), device=logits_NV.device
    )


@fused_operator("cross_entropy_gradient_", mutates_args=("logits_NV",))
def gradient_op(
    logits_NV: Tensor,
    targets_N: Tensor,
    lse_N: Tensor,
    factor: Tensor,
    start: int,
    stop: int,
    smoothing: float,
    share: float,
    z: float,
    kernels: str,
) -> None:
    """Overwrite the logits by their gradient, given the log-sum-exp over the global vocabulary."""
    if not _triton(logits_NV, kernels):
        return write(logits_NV, targets_N, lse_N, factor, start, stop, smoothing, share, z)
    shape = tile_shape(logits_NV.shape[1], BLOCK)
    cross_entropy_gradient[(-(-len(logits_NV) // shape["ROWS"]),)](
        logits_NV,
        targets_N,
        lse_N,
        factor,
        len(logits_NV),
        logits_NV.stride(0),
        logits_NV.shape[1],
        stop - start,
        start,
        IGNORE_INDEX,
        SMOOTHING=smoothing,
        SHARE=share,
        Z=z,
        WIDE=accumulation_type(logits_NV),
        **shape,
    )


@register_fake(gradient_op)
def _(
    logits_NV: Tensor,
    targets_N: Tensor,
    lse_N: Tensor,
    factor: Tensor,
    start: int,
    stop: int,
    smoothing: float,
    share: float,
    z: float,
    kernels: str,
) -> None:
    return None


def write(
    logits_NV: Tensor,
    targets_N: Tensor,
    lse_N: Tensor,
    factor: Tensor | float,
    start: int,
    stop: int,
    smoothing: float,
    share: float,
    z: float,
) -> None:
    logits_NV[:, stop - start :].zero_()
    if logits_NV.numel() and stop > start:
        real_NV, here_N = logits_NV[:, : stop - start], targets_N != IGNORE_INDEX
        _gradient(real_NV, targets_N - start, here_N, lse_N, factor, smoothing, share, z)


# ---- what the numbers of a token make ------------------------------------------------------------


def rescale_statistics(
    found_KN: Tensor, highest_N: Tensor, targets_N: Tensor, rows: tuple[int, int]
) -> Tensor:
    """Statistics [2 or 3, N] relative to the global maximum `highest_N`, which ranks then sum."""
    top, exps, target, *total = found_KN
    mine = (targets_N >= rows[0]) & (targets_N < rows[1])
    moved = [exps * (top - highest_N).exp(), (target - highest_N).masked_fill_(~mine, 0.0)]
    return torch.stack(moved + [part - (rows[1] - rows[0]) * highest_N for part in total])


def token_losses(
    sums_KN: Tensor, highest_N: Tensor, targets_N: Tensor, smoothing: float, share: float, z: float
) -> tuple[Tensor, Tensor]:
    """(loss per token, log-sum-exp), both [N], from sums over the global vocabulary."""
    log = sums_KN[0].log()
    lse_N, loss = highest_N + log, log - (1 - smoothing) * sums_KN[1]
    loss = loss - share * sums_KN[2] if smoothing else loss
    loss = loss + z * lse_N.square() if z else loss
    return loss.masked_fill_(targets_N == IGNORE_INDEX, 0.0), lse_N


def unsharded_losses(
    found_KN: Tensor,
    targets_N: Tensor,
    rows: tuple[int, int],
    smoothing: float,
    share: float,
    z: float,
) -> tuple[Tensor, Tensor]:
    """(loss per token, log-sum-exp), both [N], of an unsharded vocabulary; NaN where the target is
    outside it.
    """
    sums_KN = rescale_statistics(found_KN, found_KN[0], targets_N, rows)
    loss_N, lse_N = token_losses(sums_KN, found_KN[0], targets_N, smoothing, share, z)
    strange = (targets_N != IGNORE_INDEX) & ((targets_N < rows[0]) | (targets_N >= rows[1]))
    return loss_N.masked_fill_(strange, torch.nan), lse_N.masked_fill_(strange, torch.nan)


# ---- the operator for autograd -------------------------------------------------------------------


def cross_entropy(
    logits_NV: Tensor,
    targets_N: Tensor,
    rows: tuple[int, int] | None = None,
    *,
    smoothing: float = 0.0,
    z: float = 0.0,
    vocab: int | None = None,
    reduce: tuple[Reduce, Reduce] | None = None,
    kernels: str = "fused",
    reduction: Reduction = "sum",
) -> Tensor:
    """Cross entropy summed over valid tokens, in fp32 or better: a scalar; without reduction [N].

    Backward overwrites the logits by their gradient; autograd raises where another operator has
    saved them, or where backward runs twice. `rows` are the rank's entries of the vocabulary, whose
    logits come first in `logits_NV`; further columns are padding. With a sharded vocabulary,
    `reduce` gives the reductions (maximum, sum) over its ranks, and `vocab` its global size, which
    label smoothing needs. A target outside an unsharded vocabulary makes its token's loss and
    gradient NaN; in a sharded one its logit counts as the maximum. Does not synchronise with the
    device.

    Raises:
        ValueError: Names the unsupported argument.
    """
    rows = (0, logits_NV.shape[-1]) if rows is None else rows
    check_tokens("cross_entropy", "logits", logits_NV, targets_N, smoothing, z)
    if not 0 <= rows[1] - rows[0] <= logits_NV.shape[1]:
        raise ValueError(
            f"cross_entropy: rows are {rows}; legal: at most the logits' {logits_NV.shape[1]} "
            f"columns"
        )
    if reduce is not None and smoothing and vocab is None:
        raise ValueError(
            "cross_entropy: vocab is None; legal: entries of all ranks, where targets are smoothed"
        )
    needed = torch.is_grad_enabled() and logits_NV.requires_grad
    if needed and logits_NV.is_leaf:
        raise ValueError(
            "cross_entropy: logits are a leaf, and backward uses them up; legal: what an operator "
            "made"
        )
    share = smoothing / max(1, vocab or rows[1] - rows[0])
    targets_N = targets_N.contiguous()
    loss: Tensor = _CrossEntropy.apply(
        _rows(logits_NV), targets_N, rows, smoothing, share, z, reduce, kernels, reduction
    )
    return loss


def check_tokens(
    operator: str, name: str, x_NX: Tensor, targets_N: Tensor, smoothing: float, z: float
) -> None:
    """Check that there is a row of `x_NX` per target, and that the loss' options are legal.

    Raises:
        ValueError: Names the argument.
    """
    check_tensors(operator, name, **{name: x_NX, "targets": targets_N})
    if x_NX.ndim != 2 or not x_NX.is_floating_point():
        raise ValueError(
            f"{operator}: {name} is {x_NX.dtype} of {x_NX.ndim} dimensions; legal: floating, "
            f"[tokens, ..]"
        )
    check_shape(operator, "targets", targets_N, x_NX.shape[:1])
    if targets_N.dtype != torch.int64:
        raise ValueError(
            f"{operator}: targets are {str(targets_N.dtype).removeprefix('torch.')}; legal: int64"
        )
    if not 0 <= smoothing < 1 or z < 0:
        raise ValueError(
            f"{operator}: smoothing is {smoothing}, z is {z}; legal: 0 <= smoothing < 1, z >= 0"
        )


def _rows(logits_NV: Tensor) -> Tensor:
    """The logits if their rows are contiguous and do not overlap; else a copy to overwrite."""
    own = logits_NV.stride(1) == 1 and logits_NV.stride(0) >= logits_NV.shape[1]
    return logits_NV if own else logits_NV.clone(memory_format=torch.contiguous_format)


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits, targets and log-sum-exp; backward overwrites the logits by the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        targets_N: Tensor,
        rows: tuple[int, int],
        smoothing: float,
        share: float,
        z: float,
        reduce: tuple[Reduce, Reduce] | None,
        kernels: str,
        reduction: Reduction,
    ) -> Tensor:
        found = statistics_op(logits_NV, targets_N, *rows, smoothing > 0, kernels)
        if reduce is None:
            loss_N, lse_N = unsharded_losses(found, targets_N, rows, smoothing, share, z)
        else:
            # Two all-reduces of [N] and [2 or 3, N] instead of one of logits: every rank's sums are
            # first made relative to the global maximum, which keeps the exponentials finite.
            highest_N = reduce[0](found[0].clone())
            sums_KN = reduce[1](rescale_statistics(found, highest_N, targets_N, rows))
            loss_N, lse_N = token_losses(sums_KN, highest_N, targets_N, smoothing, share, z)
        ctx.save_for_backward(logits_NV, targets_N, lse_N)
        ctx.form = (*rows, smoothing, share, z, kernels)
        return loss_N if reduction == "none" else sum_token_losses(loss_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, targets_N, lse_N = ctx.saved_tensors
        # The operator declares that it mutates the logits, so that their version counter advances
        # and a second backward, or another reader, fails instead of reading the gradient.
        if gradient.ndim:  # a factor of each token, which the operator takes one of
            held = gradient_scale(logits_NV.dtype, 0.0)
            gradient_op(logits_NV, targets_N, lse_N, gradient.new_full((), held), *ctx.form)
            logits_NV.mul_((gradient / held)[:, None])
        else:
            gradient_op(logits_NV, targets_N, lse_N, gradient, *ctx.form)
        return logits_NV.detach(), *[None] * 8


def gradient_scale(dtype: torch.dtype, z: float) -> float:
    """Factor of logits' gradients that are multiplied by their own later: a power of two by which
    none overflows, and which leaves small ones of fp16.
    """
    return 1.0 if dtype != torch.float16 else 2.0**10 if z else 2.0**15


def _triton(logits_NV: Tensor, kernels: str) -> bool:
    return kernels == "fused" and runs_triton(logits_NV.device) and logits_NV.numel() > 0


def tile_shape(num_columns: int, most: int) -> dict[str, int]:
    """Tile shape of at most `most` entries, of several rows if those are short, and its warps."""
    block = min(next_power_of_2(num_columns), most)
    rows = max(1, min(most, BLOCK) // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(32, max(4, rows * block // 512))}
