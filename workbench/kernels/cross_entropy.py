"""Summed cross entropy of logits, whose gradient takes the logits' place; with label smoothing
(Szegedy et al. 2016, 1512.00567) and the z-loss, z times the squared log of the softmax's
denominator (Chowdhery et al. 2022, 2204.02311).

Forward reads the logits once, for a few numbers a token (online softmax, Milakov and Gimelshein
2018, 1805.02867), and leaves them as they are. Backward reads them again and writes the gradient
over them: nothing else of the vocabulary's width is ever made, and the gradient is rounded once,
after it was multiplied by what comes in, as fp16 needs it. Over a split vocabulary the numbers of
each part are reduced by the caller's collectives. All of it is in fp32 or better.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import custom_op

from workbench.kernels.backends.compiled_reference import compiled
from workbench.kernels.backends.triton_compat import jit, next_power_of_2, runs_triton, tl, wide
from workbench.kernels.input_checks import check, check_shape, wide_dtype
from workbench.models.seams import IGNORE_INDEX, at_least_fp32

BLOCK = 2048
"""Entries that a program of few warps takes at once: many programs share a processor, and hide each
other's waits.
"""

Reduce = Callable[[Tensor], Tensor]
"""A reduction over ranks of a contiguous tensor, in place."""


def reference(
    logits_NV: Tensor, targets_N: Tensor, smoothing: float = 0.0, z: float = 0.0
) -> Tensor:
    """The sum over valid tokens as plain operators."""
    own = at_least_fp32(logits_NV)
    loss = F.cross_entropy(
        own, targets_N, reduction="sum", ignore_index=IGNORE_INDEX, label_smoothing=smoothing
    )
    return loss + z * own.logsumexp(-1)[targets_N != IGNORE_INDEX].square().sum() if z else loss


# ---- Triton --------------------------------------------------------------------------------------


@jit
def load(ROWS_AT, columns, here, num_columns, num_real, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of rows, -inf where nothing real is. Padding is loaded, so that the mask is as
    aligned as the rows.
    """
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
    """Maximum, sum of exponentials over it, target's logit (else 0) and, where smoothed, the sum,
    [ROWS, 1] each.
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
    """Over the logits; zero where the token is ignored and in padding."""
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
    """A few rows a program; those of ignored tokens are not read."""
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
    """In place of the logits, times what came in."""
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


@compiled
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


@compiled
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


@custom_op("workbench::cross_entropy_statistics", mutates_args=())
def statistics_op(
    logits_NV: Tensor, targets_N: Tensor, start: int, stop: int, smoothed: bool, kernels: str
) -> Tensor:
    """[3 or 4, N], in fp32 or better: of the entries [start, stop) of the vocabulary, with which
    each row begins, the maximum, the sum of exponentials over it, the target's logit (0: it is not
    here) and, where `smoothed`, the sum.
    """
    num_real = stop - start
    if not num_real or not len(logits_NV):
        out = _room(logits_NV, smoothed).zero_()
        out[0] = -torch.inf
        return out
    if not _triton(logits_NV, kernels):
        return _statistics(logits_NV[:, :num_real], targets_N - start, smoothed)
    out = _room(logits_NV, smoothed)
    shape = tile(logits_NV.shape[1], BLOCK)
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
        WIDE=wide(logits_NV),
        **shape,
    )
    return out


@statistics_op.register_fake
def _(
    logits_NV: Tensor, targets_N: Tensor, start: int, stop: int, smoothed: bool, kernels: str
) -> Tensor:
    return _room(logits_NV, smoothed)


def _room(logits_NV: Tensor, smoothed: bool) -> Tensor:
    return torch.empty(
        3 + smoothed, len(logits_NV), dtype=wide_dtype(logits_NV), device=logits_NV.device
    )


@custom_op("workbench::cross_entropy_gradient_", mutates_args=("logits_NV",))
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
    """The gradient in place of the logits, from the log of the whole vocabulary's sum of
    exponentials.
    """
    if not _triton(logits_NV, kernels):
        return write(logits_NV, targets_N, lse_N, factor, start, stop, smoothing, share, z)
    shape = tile(logits_NV.shape[1], BLOCK)
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
        WIDE=wide(logits_NV),
        **shape,
    )


@gradient_op.register_fake
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


def relative(
    found_KN: Tensor, highest_N: Tensor, targets_N: Tensor, rows: tuple[int, int]
) -> Tensor:
    """Statistics without their maximum, [2 or 3, N], made relative to `highest_N` of the whole
    vocabulary: what the parts of the vocabulary then add up to is what the whole has.
    """
    top, exps, target, *total = found_KN
    mine = (targets_N >= rows[0]) & (targets_N < rows[1])
    moved = [exps * (top - highest_N).exp(), (target - highest_N).masked_fill_(~mine, 0.0)]
    return torch.stack(moved + [part - (rows[1] - rows[0]) * highest_N for part in total])


def losses(
    sums_KN: Tensor, highest_N: Tensor, targets_N: Tensor, smoothing: float, share: float, z: float
) -> tuple[Tensor, Tensor]:
    """(each token's loss, the log of its sum of exponentials), both [N], from sums over the whole
    vocabulary.
    """
    log = sums_KN[0].log()
    lse_N, loss = highest_N + log, log - (1 - smoothing) * sums_KN[1]
    loss = loss - share * sums_KN[2] if smoothing else loss
    loss = loss + z * lse_N.square() if z else loss
    return loss.masked_fill_(targets_N == IGNORE_INDEX, 0.0), lse_N


def whole_losses(
    found_KN: Tensor,
    targets_N: Tensor,
    rows: tuple[int, int],
    smoothing: float,
    share: float,
    z: float,
) -> tuple[Tensor, Tensor]:
    """The same from statistics of the whole vocabulary; both are NaN where the target is no part of
    it.
    """
    sums_KN = relative(found_KN, found_KN[0], targets_N, rows)
    loss_N, lse_N = losses(sums_KN, found_KN[0], targets_N, smoothing, share, z)
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
) -> Tensor:
    """Sum over valid tokens, in fp32 or better; a scalar. Backward uses the logits up: their
    gradient is written there.

    `rows` is the part of the vocabulary whose logits come first in `logits_NV`; columns past it are
    padding. Where it is not all, `reduce` makes the maximum and the sum over the ranks that hold
    the others, and `vocab` is their number altogether, which smoothing asks for. Who has kept the
    logits for a backward of his own, or runs this one twice, is told so by autograd. A target
    outside an unsplit vocabulary makes its token's loss and gradient NaN; in a split one, it is as
    one whose logit is the maximum. Nothing waits for the device. Raises ValueError naming what is
    not right.
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
        _rows(logits_NV), targets_N, rows, smoothing, share, z, reduce, kernels
    )
    return loss


def check_tokens(
    operator: str, name: str, x_NX: Tensor, targets_N: Tensor, smoothing: float, z: float
) -> None:
    """Raise ValueError unless a row of `x_NX` stands beside every target, and the loss has a form
    that there is.
    """
    check(operator, name, **{name: x_NX, "targets": targets_N})
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
    """As they are, if each row lies in one piece of its own; else copied, and the copy is used
    up.
    """
    own = logits_NV.stride(1) == 1 and logits_NV.stride(0) >= logits_NV.shape[1]
    return logits_NV if own else logits_NV.clone(memory_format=torch.contiguous_format)


class _CrossEntropy(torch.autograd.Function):
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
    ) -> Tensor:
        found = statistics_op(logits_NV, targets_N, *rows, smoothing > 0, kernels)
        if reduce is None:
            loss_N, lse_N = whole_losses(found, targets_N, rows, smoothing, share, z)
        else:
            highest_N = reduce[0](found[0].clone())
            sums_KN = reduce[1](relative(found, highest_N, targets_N, rows))
            loss_N, lse_N = losses(sums_KN, highest_N, targets_N, smoothing, share, z)
        ctx.save_for_backward(logits_NV, targets_N, lse_N)
        ctx.form = (*rows, smoothing, share, z, kernels)
        return loss_N.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, targets_N, lse_N = ctx.saved_tensors
        gradient_op(logits_NV, targets_N, lse_N, gradient, *ctx.form)
        return logits_NV.detach(), *[None] * 7


def _triton(logits_NV: Tensor, kernels: str) -> bool:
    return kernels == "fused" and runs_triton(logits_NV.device) and logits_NV.numel() > 0


def tile(num_columns: int, most: int) -> dict[str, int]:
    """A tile of at most `most` entries, of several rows where those are short, and the warps that
    take it.
    """
    block = min(next_power_of_2(num_columns), most)
    rows = max(1, min(most, BLOCK) // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(32, max(4, rows * block // 512))}
