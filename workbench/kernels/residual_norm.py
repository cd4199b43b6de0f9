"""Fused residual + RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) and residual + LayerNorm (Ba
et al. 2016, arXiv 1607.06450).

Forward reads the branch and the residual once, and writes their sum and its norm. Backward reads
the sum and both gradients once, and one or two saved statistics per row. Statistics are in fp32 or
better.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workbench.kernels.backends.compiled_reference import torch_compiled
from workbench.kernels.backends.kernel_launch import launch
from workbench.kernels.backends.operator_registration import fused_operator, register_fake
from workbench.kernels.backends.triton_compat import (
    accumulation_type,
    device_programs,
    jit,
    next_power_of_2,
    runs_triton,
    tl,
)
from workbench.kernels.input_checks import (
    accumulation_dtype,
    check_shape,
    check_tensors,
    contiguous_like,
    flatten_rows,
)
from workbench.models.seams import at_least_fp32

MAX_ROW_BYTES = 2**15
"""Bytes of a row that fit in one program's registers; wider rows are not done by Triton."""
MAX_BIAS_COLUMNS = 8192
"""Columns up to which the bias gradient is accumulated beside the weight's; else separately."""
TILE = 2048
"""Entries per tile of narrow rows."""
NUMEL_PER_THREAD = 32
"""Entries per thread of wide rows: four 16-byte loads of each tensor are in flight at once."""


def reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """(norm of the sum, sum) by plain operators: LayerNorm where `centred`, else RMSNorm."""
    total = x if residual is None else x + residual
    own = at_least_fp32(total)
    if centred:
        own = own - own.mean(-1, keepdim=True)
    normal = own * (own.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    y = normal.to(x.dtype) * weight
    return (y if bias is None else y + bias), total


# ---- Triton --------------------------------------------------------------------------------------


@jit
def add_norm_forward(  # type: ignore[no-untyped-def]
    X,
    R,
    W,
    B,
    Y,
    TOTAL,
    MEAN,
    SCALE,
    num_rows,
    num_columns,
    epsilon,
    HAS_R: tl.constexpr,
    HAS_B: tl.constexpr,
    CENTRED: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of rows per program: sum, statistics, norm."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    here = (rows < num_rows)[:, None] & inside[None, :]
    at = rows[:, None] * num_columns + columns[None, :]
    total = tl.load(X + at, mask=here, other=0.0).to(WIDE)
    if HAS_R:
        total += tl.load(R + at, mask=here, other=0.0).to(WIDE)
        # Backward reads the sum as stored, rounded: forward normalises the same values.
        total = total.to(TOTAL.dtype.element_ty).to(WIDE)
        tl.store(TOTAL + at, total.to(TOTAL.dtype.element_ty), mask=here)
    if CENTRED:
        mean = tl.sum(total, 1) / num_columns
        tl.store(MEAN + rows, mean, mask=rows < num_rows)
        total = tl.where(here, total - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(total * total, 1) / num_columns + epsilon)
    tl.store(SCALE + rows, scale, mask=rows < num_rows)
    y = total * scale[:, None] * tl.load(W + columns, mask=inside, other=0.0).to(WIDE)[None, :]
    if HAS_B:
        y += tl.load(B + columns, mask=inside, other=0.0).to(WIDE)[None, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=here)


@jit
def add_norm_backward(  # type: ignore[no-untyped-def]
    DY,
    DTOTAL,
    TOTAL,
    MEAN,
    SCALE,
    W,
    DX,
    DW,
    DB,
    num_rows,
    num_columns,
    HAS_TOTAL: tl.constexpr,
    HAS_DB: tl.constexpr,
    CENTRED: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A grid-stride loop over tiles; each program accumulates a partial weight gradient.

    The inputs of a row's sums are reloaded after them, from the cache: they would not fit in
    registers.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    dw = tl.zeros((BLOCK,), WIDE)
    db = tl.zeros((BLOCK,), WIDE)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        here = (rows < num_rows)[:, None] & inside[None, :]
        at = rows[:, None] * num_columns + columns[None, :]
        scale = tl.load(SCALE + rows, mask=rows < num_rows, other=0.0)[:, None]
        normal = tl.load(TOTAL + at, mask=here, other=0.0, eviction_policy="evict_last").to(WIDE)
        incoming = tl.load(DY + at, mask=here, other=0.0, eviction_policy="evict_last").to(WIDE)
        if HAS_TOTAL:  # loaded early, to overlap with the sums
            dtotal = tl.load(DTOTAL + at, mask=here, other=0.0)
        if CENTRED:
            mean = tl.load(MEAN + rows, mask=rows < num_rows, other=0.0)[:, None]
            normal -= mean
        normal *= scale
        dw += tl.sum(incoming * normal, 0)
        if HAS_DB:
            db += tl.sum(incoming, 0)
        incoming *= tl.load(W + columns, mask=inside, other=0.0, eviction_policy="evict_last").to(
            WIDE
        )[None, :]
        along = tl.sum(incoming * normal, 1)[:, None] / num_columns
        if CENTRED:
            across = tl.sum(incoming, 1)[:, None] / num_columns
        normal = tl.load(TOTAL + at, mask=here, other=0.0, eviction_policy="evict_first").to(WIDE)
        if CENTRED:
            normal -= mean
        dx = tl.load(DY + at, mask=here, other=0.0, eviction_policy="evict_first").to(WIDE)
        dx = (
            dx * tl.load(W + columns, mask=inside, other=0.0).to(WIDE)[None, :]
            - normal * scale * along
        )
        if CENTRED:
            dx -= across
        dx *= scale
        if HAS_TOTAL:
            dx += dtotal.to(WIDE)
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=here)
    own = tl.program_id(0).to(tl.int64) * num_columns + columns
    tl.store(DW + own, dw, mask=inside)
    if HAS_DB:
        tl.store(DB + own, db, mask=inside)


# ---- without Triton: the same by a compiler ------------------------------------------------------


@torch_compiled
def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    total = x if residual is None else x + residual
    own = at_least_fp32(total)
    mean = own.mean(-1)
    own = own - mean[:, None] if centred else own
    scale = (own.square().mean(-1) + epsilon).rsqrt()
    y = own * scale[:, None] * weight
    return (
        (y if bias is None else y + bias).to(x.dtype),
        total,
        torch.stack((scale, mean) if centred else (scale,)),
    )


@torch_compiled
def _backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    statistics: Tensor,
    weight: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    incoming, normal = at_least_fp32(dy), at_least_fp32(total)
    centred, scale = len(statistics) == 2, statistics[0][:, None]
    normal = (normal - statistics[1][:, None] if centred else normal) * scale
    dw, db = (incoming * normal).sum(0), incoming.sum(0) if has_bias else incoming.new_empty(0)
    incoming = incoming * weight
    dx = incoming - normal * (incoming * normal).mean(-1, keepdim=True)
    dx = (dx - incoming.mean(-1, keepdim=True) if centred else dx) * scale
    return (
        (dx if dtotal is None else dx + dtotal).to(total.dtype),
        dw.to(weight.dtype),
        db.to(weight.dtype),
    )


# ---- the operator --------------------------------------------------------------------------------


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    centred: bool,
    kernels: str = "fused",
) -> tuple[Tensor, Tensor]:
    """Fused residual addition and normalisation, differentiable.

    Args:
        x: Branch [..., D].
        residual: [..., D]; without, the sum is x.
        weight: [D].
        bias: [D], of LayerNorm.
        epsilon: Added to the variance.
        centred: LayerNorm instead of RMSNorm.
        kernels: compiled, or fused: Triton where it runs.

    Returns:
        (norm of the sum, sum), both [..., D].

    Raises:
        ValueError: Names the tensor of an unsupported device, dtype or shape.
    """
    check_tensors("add_norm", "x", x=x, residual=residual, weight=weight, bias=bias)
    check_shape("add_norm", "residual", residual, x.shape)
    check_shape("add_norm", "weight", weight, x.shape[-1:])
    check_shape("add_norm", "bias", bias, x.shape[-1:])
    if residual is not None and residual.dtype != x.dtype:
        raise ValueError(f"add_norm: residual is {residual.dtype}; legal: x's {x.dtype}")
    bias = None if bias is None else bias.contiguous()
    y, total = _AddNorm.apply(x, residual, weight.contiguous(), bias, epsilon, centred, kernels)
    return y, x if residual is None else total


class _AddNorm(torch.autograd.Function):
    """Returns the norm and the sum, which is empty without a residual."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        centred: bool,
        kernels: str,
    ) -> tuple[Tensor, Tensor]:
        y, total, statistics = add_norm_op(x, residual, weight, bias, epsilon, centred, kernels)
        ctx.has_residual, ctx.has_bias = residual is not None, bias is not None
        ctx.save_for_backward(x if residual is None else total, statistics, weight)
        ctx.set_materialize_grads(False)
        ctx.kernels = kernels
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        dy = torch.zeros_like(ctx.saved_tensors[0]) if dy is None else dy
        dtotal = dtotal if ctx.has_residual else None
        dx, dw, db = add_norm_backward_op(dy, dtotal, *ctx.saved_tensors, ctx.has_bias, ctx.kernels)
        dresidual, db = dx if ctx.has_residual else None, db if ctx.has_bias else None
        return dx, dresidual, dw, db, None, None, None


@fused_operator("add_norm")
def add_norm_op(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    centred: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(norm, sum or empty, statistics [1 or 2, rows]: inverse deviation, and for LayerNorm
    mean).
    """
    if not _triton(x, kernels):
        rows = flatten_rows(x), None if residual is None else flatten_rows(residual)
        y, total, statistics = _forward(*rows, weight, bias, epsilon, centred)
        total = x.new_empty(0) if residual is None else total.view(x.shape)
        return y.view(x.shape), total, statistics
    y, total, statistics = _outputs(x, residual, centred)
    num_rows, tile = statistics.shape[1], _tile(x.shape[-1])
    residual = None if residual is None else residual.contiguous()
    launch(
        add_norm_forward,
        -(-num_rows // tile["ROWS"]),
        (x.contiguous(), residual, weight, bias, y, total, *_mean_and_scale(statistics)),
        (num_rows, x.shape[-1], epsilon),
        HAS_R=residual is not None,
        HAS_B=bias is not None,
        CENTRED=centred,
        WIDE=accumulation_type(x),
        **tile,
    )
    return y, total, statistics


def _outputs(x: Tensor, residual: Tensor | None, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = math.prod(x.shape[:-1])
    statistics = x.new_empty(1 + centred, num_rows, dtype=accumulation_dtype(x))
    total = x.new_empty(0) if residual is None else contiguous_like(x)
    return contiguous_like(x), total, statistics


def _mean_and_scale(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation [rows] each; without a mean, which is not read, the latter."""
    if len(statistics) == 1:
        return statistics, statistics
    return statistics[1], statistics[0]


@register_fake(add_norm_op)
def _(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    centred: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(x, residual, centred)


@fused_operator("add_norm_backward")
def add_norm_backward_op(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    statistics: Tensor,
    weight: Tensor,
    has_bias: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of sum [..., D], weight [D] and bias [D]; empty where there is no bias."""
    if not _triton(total, kernels):
        rows = flatten_rows(dy), None if dtotal is None else flatten_rows(dtotal)
        dx, dw, db = _backward(*rows, flatten_rows(total), statistics, weight, has_bias)
        return dx.view(total.shape), dw, db
    num_rows, tile = statistics.shape[1], _tile(total.shape[-1])
    held = has_bias and tile["BLOCK"] <= MAX_BIAS_COLUMNS
    num_programs = min(
        device_programs(total.device, _resident(tile, held)), -(-num_rows // tile["ROWS"])
    )
    dx = contiguous_like(total)
    parts = statistics.new_empty(1 + held, num_programs, total.shape[-1])
    dtotal = None if dtotal is None else dtotal.contiguous()
    read = dy.contiguous(), dtotal, total.contiguous(), *_mean_and_scale(statistics), weight
    launch(
        add_norm_backward,
        num_programs,
        (*read, dx, parts, parts[-1] if held else parts),
        (num_rows, total.shape[-1]),
        HAS_TOTAL=dtotal is not None,
        HAS_DB=held,
        CENTRED=len(statistics) == 2,
        WIDE=accumulation_type(total),
        **tile,
    )
    db = (
        parts[1].sum(0)
        if held
        else flatten_rows(dy).sum(0, dtype=parts.dtype)
        if has_bias
        else weight.new_empty(0)
    )
    return dx, parts[0].sum(0).to(weight.dtype), db.to(weight.dtype)


@register_fake(add_norm_backward_op)
def _(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    statistics: Tensor,
    weight: Tensor,
    has_bias: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    db = weight.new_empty(len(weight) if has_bias else 0)
    return contiguous_like(total), torch.empty_like(weight), db


def _triton(x: Tensor, kernels: str) -> bool:
    fits = 0 < x.shape[-1] * x.element_size() <= MAX_ROW_BYTES and x.numel() > 0
    return kernels == "fused" and runs_triton(x.device) and fits


def _tile(columns: int) -> dict[str, int]:
    block = next_power_of_2(columns)
    return {
        "ROWS": max(1, TILE // block),
        "BLOCK": block,
        "num_warps": max(4, block // (32 * NUMEL_PER_THREAD)),
    }


def _resident(tile: dict[str, int], held: bool) -> int:
    """Programs of backward per multiprocessor: its registers hold 16 warps, or 12 that accumulate
    the bias gradient too. More would run in a second wave.
    """
    return max(1, (12 if held else 16) // tile["num_warps"])
