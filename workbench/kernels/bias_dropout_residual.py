"""Fused bias + dropout (Srivastava et al. 2014) + residual without a stored mask.

The mask is the counter-based hash of `workbench.models.counter_dropout`, to the bit, so that every
path and every mesh drops the same entries; backward recomputes it from the saved row numbers.
Forward reads the branch and the residual once and writes their sum; backward reads and writes one
gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    flatten_rows,
)
from workbench.models.counter_dropout import apply_dropout
from workbench.runtime_facts.cast_sizes import DROPOUT_CHUNK_NUMEL

TILE = 4096
"""Entries per tile: 32 per thread; of a single row where it is wide enough, because hashing a row's
key costs as much as hashing three entries.
"""
PROGRAMS_PER_SM = 4
"""Programs of backward per multiprocessor: as many as its registers hold, which hides latency."""
MIN_BLOCK_COLUMNS = 1024
"""Columns per program where a row is not a multiple of more."""


def reference(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    rows: Tensor,
    key: int,
    rate: float,
    first: int = 0,
) -> Tensor:
    """residual + dropout(x + bias) by plain operators."""
    branch = x if bias is None else x + bias
    dropped = branch * apply_dropout(torch.ones_like(x), rows, key, rate, first)
    return dropped if residual is None else residual + dropped


# ---- Triton --------------------------------------------------------------------------------------


@jit
def dropout_factors(  # type: ignore[no-untyped-def]
    NUMBERS,
    rows,
    columns,
    num_rows,
    key,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """What the entries [rows, columns] are multiplied by: `row_keys` and `random_bits` of
    `workbench.models.counter_hash`.

    Unsigned integers shift zeros in, which that code masks for; its comparison is of signed ones.
    Its last step there, bits ^ (bits >> 16), decides only where the upper halves of bits and
    threshold are the same: so theirs is taken.
    """
    numbers = tl.load(NUMBERS + rows, mask=rows < num_rows, other=0)
    mixed = numbers.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15 + key
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    mixed = mixed ^ (mixed >> 31)
    bits = (columns.to(tl.uint32) * 0x9E3779B9)[None, :] + mixed.to(tl.uint32)[:, None]
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D ^ (mixed >> 32).to(tl.uint32)[:, None]
    bits = (bits ^ (bits >> 15)) * 0x846CA68B ^ ((THRESHOLD >> 16) & 0xFFFF)
    return tl.where(bits.to(tl.int32, bitcast=True) >= THRESHOLD, tl.full((1, 1), SCALE, WIDE), 0.0)


@jit
def dropout_add_forward(  # type: ignore[no-untyped-def]
    X,
    B,
    R,
    NUMBERS,
    OUT,
    num_rows,
    num_columns,
    first,
    key,
    HAS_B: tl.constexpr,
    HAS_R: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile per program; also the backward where there is no bias."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    here = (rows < num_rows)[:, None] & inside[None, :]
    at = rows[:, None] * num_columns + columns[None, :]
    x = tl.load(X + at, mask=here, other=0.0).to(WIDE)
    if HAS_B:
        x += tl.load(B + columns, mask=inside, other=0.0).to(WIDE)[None, :]
    x *= dropout_factors(NUMBERS, rows, first + columns, num_rows, key, THRESHOLD, SCALE, WIDE)
    if HAS_R:
        x += tl.load(R + at, mask=here, other=0.0).to(WIDE)
    tl.store(OUT + at, x.to(OUT.dtype.element_ty), mask=here)


@jit
def dropout_add_backward(  # type: ignore[no-untyped-def]
    DY,
    NUMBERS,
    DX,
    DB,
    num_rows,
    num_columns,
    first,
    key,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A grid-stride loop over tiles; each program accumulates a partial bias gradient."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    db = tl.zeros((ROWS, BLOCK), WIDE)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        here = (rows < num_rows)[:, None] & inside[None, :]
        at = rows[:, None] * num_columns + columns[None, :]
        dx = tl.load(DY + at, mask=here, other=0.0).to(WIDE)
        dx *= dropout_factors(NUMBERS, rows, first + columns, num_rows, key, THRESHOLD, SCALE, WIDE)
        db += dx
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=here)
    tl.store(DB + tl.program_id(0).to(tl.int64) * num_columns + columns, tl.sum(db, 0), mask=inside)


# ---- without Triton ------------------------------------------------------------------------------


def _plain(
    x_ND: Tensor,
    bias: Tensor | None,
    residual_ND: Tensor | None,
    rows_N: Tensor,
    key: int,
    rate: float,
    first: int,
) -> Tensor:
    """The model's plain operators, in chunks of rows; torch.compile makes the hash 3x slower."""
    out = torch.empty_like(x_ND)
    size = max(1, DROPOUT_CHUNK_NUMEL // max(1, x_ND.shape[-1]))
    for start in range(0, len(x_ND), size):
        piece = slice(start, start + size)
        branch = x_ND[piece] if bias is None else (x_ND[piece] + bias).to(x_ND.dtype)
        dropped = apply_dropout(branch, rows_N[piece], key, rate, first)
        out[piece] = dropped if residual_ND is None else dropped.add_(residual_ND[piece])
    return out


# ---- the operator --------------------------------------------------------------------------------


def dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    rows: Tensor,
    key: int,
    rate: float,
    first: int = 0,
    kernels: str = "fused",
) -> Tensor:
    """Fused bias, dropout and residual addition, differentiable.

    Args:
        x: Branch [..., D].
        bias: [D].
        residual: [..., D].
        rows: int64 numbers of the tokens [...] (`SampleIndices.rows`).
        key: The module's key of the hash.
        rate: Share of entries that are dropped.
        first: Channel at which x starts, where channels are sharded.
        kernels: compiled, which is plain operators, or fused: Triton where it runs.

    Returns:
        residual + dropout(x + bias), [..., D].

    Raises:
        ValueError: Names the argument of an unsupported device, dtype, shape or value.
    """
    check_tensors("dropout_add", "x", x=x, bias=bias, residual=residual, rows=rows)
    check_shape("dropout_add", "bias", bias, x.shape[-1:])
    check_shape("dropout_add", "residual", residual, x.shape)
    check_shape("dropout_add", "rows", rows, x.shape[:-1])
    if rows.dtype != torch.int64:
        raise ValueError(
            f"dropout_add: rows is {str(rows.dtype).removeprefix('torch.')}; legal: int64"
        )
    if not 0 <= rate <= 1 - 2**-32:
        raise ValueError(f"dropout_add: rate is {rate}; legal: 0 to 1 - 2^-32")
    key = key & 2**63 - 1
    out: Tensor = _DropoutAdd.apply(x, bias, residual, rows, key, rate, first, kernels)
    return out


class _DropoutAdd(torch.autograd.Function):
    """Saves neither mask nor input: the hash of the row numbers gives the mask again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        rows: Tensor,
        *options: Any,
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.options = options
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        out: Tensor = dropout_add_op(x, bias, residual, rows, *options)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        has_bias, (*mask, kernels) = ctx.bias_dtype is not None, ctx.options
        dx, db = dropout_add_backward_op(dy, *ctx.saved_tensors, *mask, has_bias, kernels)
        dbias = db.to(ctx.bias_dtype) if has_bias else None
        dresidual = None if ctx.residual_dtype is None else dy.to(ctx.residual_dtype)
        return dx, dbias, dresidual, *[None] * 5


@fused_operator("dropout_add")
def dropout_add_op(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    rows: Tensor,
    key: int,
    rate: float,
    first: int,
    kernels: str,
) -> Tensor:
    """The operator behind `dropout_add`; contiguous result."""
    x_ND, residual_ND = flatten_rows(x), None if residual is None else flatten_rows(residual)
    rows_N = rows.reshape(-1).contiguous()
    if not _triton(x, kernels):
        return _plain(x_ND, bias, residual_ND, rows_N, key, rate, first).view(x.shape)
    out = torch.empty_like(x_ND)
    tile = _tile(x.shape[-1])
    dropout_add_forward[_grid(x_ND, tile)](
        x_ND,
        None if bias is None else bias.contiguous(),
        residual_ND,
        rows_N,
        out,
        *x_ND.shape,
        first,
        key,
        HAS_B=bias is not None,
        HAS_R=residual is not None,
        WIDE=accumulation_type(x),
        **_constants(rate),
        **tile,
    )
    return out.view(x.shape)


@register_fake(dropout_add_op)
def _(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    rows: Tensor,
    key: int,
    rate: float,
    first: int,
    kernels: str,
) -> Tensor:
    return x.new_empty(x.shape)


@fused_operator("dropout_add_backward")
def dropout_add_backward_op(
    dy: Tensor, rows: Tensor, key: int, rate: float, first: int, has_bias: bool, kernels: str
) -> tuple[Tensor, Tensor]:
    """Gradients of branch [..., D] and bias [D], the latter in fp32 or better, empty without
    one.
    """
    if not has_bias:
        return dropout_add_op(dy, None, None, rows, key, rate, first, kernels), _no_bias(dy)
    dy_ND, rows_N = flatten_rows(dy), rows.reshape(-1).contiguous()
    if not _triton(dy, kernels):
        dx = _plain(dy_ND, None, None, rows_N, key, rate, first)
        return dx.view(dy.shape), dx.sum(0, dtype=accumulation_dtype(dx))
    tile = _tile(dy.shape[-1])
    num_tiles, num_blocks = _grid(dy_ND, tile)
    num_parts = min(num_tiles, max(1, device_programs(dy.device, PROGRAMS_PER_SM) // num_blocks))
    dx = torch.empty_like(dy_ND)
    parts = torch.empty(num_parts, dy.shape[-1], dtype=accumulation_dtype(dy), device=dy.device)
    dropout_add_backward[num_parts, num_blocks](
        dy_ND,
        rows_N,
        dx,
        parts,
        *dy_ND.shape,
        first,
        key,
        WIDE=accumulation_type(dy),
        **_constants(rate),
        **tile,
    )
    return dx.view(dy.shape), parts.sum(0)


@register_fake(dropout_add_backward_op)
def _(
    dy: Tensor, rows: Tensor, key: int, rate: float, first: int, has_bias: bool, kernels: str
) -> tuple[Tensor, Tensor]:
    return dy.new_empty(dy.shape), dy.new_empty(
        dy.shape[-1:], dtype=accumulation_dtype(dy)
    ) if has_bias else _no_bias(dy)


def _no_bias(dy: Tensor) -> Tensor:
    return dy.new_empty(0, dtype=accumulation_dtype(dy))


def _triton(x: Tensor, kernels: str) -> bool:
    return kernels == "fused" and runs_triton(x.device) and x.numel() > 0


def _tile(columns: int) -> dict[str, int]:
    block = min(next_power_of_2(columns), max(MIN_BLOCK_COLUMNS, min(TILE, columns & -columns)))
    return {"ROWS": TILE // block, "BLOCK": block, "num_warps": 4}


def _grid(x_ND: Tensor, tile: dict[str, int]) -> tuple[int, int]:
    return -(-len(x_ND) // tile["ROWS"]), -(-x_ND.shape[-1] // tile["BLOCK"])


def _constants(rate: float) -> dict[str, Any]:
    return {"THRESHOLD": round(rate * 2**32) - 2**31, "SCALE": 1 / (1 - rate)}
