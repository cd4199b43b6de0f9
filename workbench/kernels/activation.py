"""Fused feed-forward activation: SwiGLU, GeGLU (Shazeer 2020, arXiv 2002.05202), bias + GELU
(Hendrycks 2016, arXiv 1606.08415).

Only the inputs are saved; intermediate values are recomputed in backward, which reads each input
once. Every kind is x sigmoid(z(x)): SiLU has z = x; tanh-GELU has z = 2 sqrt(2 / pi) (x + 0.044715
x^3), because 1 + tanh(t) = 2 sigmoid(2 t). ReLU is torch's, which saves only its result, as the
next GEMM does anyway.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
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
)
from workbench.models.seams import at_least_fp32

GATED = ("swiglu", "geglu")
"""Kinds that multiply by the up projection."""
KINDS = (*GATED, "gelu", "relu")
TILE = 1024
"""Entries per program of each of two tensors or more: at least 16 bytes per thread."""
PROGRAMS_PER_SM = 8
"""Programs per multiprocessor where each walks rows in a grid-stride loop and sums over them."""


def reference(
    kind: str, gate: Tensor, up: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Activation by plain operators, which the kernel must equal."""
    x = gate if bias is None else gate + bias
    if kind == "relu":
        return F.relu(x)
    activated = F.silu(x) if kind == "swiglu" else F.gelu(x, approximate="tanh")
    return activated if up is None else activated * up


# ---- Triton --------------------------------------------------------------------------------------


@jit
def _sigmoid(x, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """sigmoid(z(x)) and dz/dx."""
    z, slope = x, 1.0
    if not SILU:
        slope = 1.5957691216057308 + 0.21406444881780076 * x * x
        z = x * (1.5957691216057308 + 0.07135481627260025 * x * x)
    return 1.0 / (1.0 + tl.exp(-z)), slope


@jit
def activate_forward(  # type: ignore[no-untyped-def]
    X,
    UP,
    BIAS,
    Y,
    num_rows,
    num_columns,
    x_stride,
    up_stride,
    SILU: tl.constexpr,
    HAS_UP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of rows and columns per program."""
    num_blocks = tl.cdiv(num_columns, BLOCK)
    rows = ((tl.program_id(0) // num_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = ((tl.program_id(0) % num_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
    here = (rows < num_rows) & (columns < num_columns)
    x = tl.load(X + rows * x_stride + columns, mask=here, other=0.0).to(WIDE)
    if HAS_BIAS:
        x += tl.load(BIAS + columns, mask=columns < num_columns, other=0.0).to(WIDE)
    y = x * _sigmoid(x, SILU)[0]
    if HAS_UP:
        y *= tl.load(UP + rows * up_stride + columns, mask=here, other=0.0).to(WIDE)
    tl.store(Y + rows * num_columns + columns, y.to(Y.dtype.element_ty), mask=here)


@jit
def activate_backward(  # type: ignore[no-untyped-def]
    DY,
    X,
    UP,
    BIAS,
    DX,
    DUP,
    DBIAS,
    num_rows,
    num_columns,
    dy_stride,
    x_stride,
    up_stride,
    SILU: tl.constexpr,
    HAS_UP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile per program; with a bias, a grid-stride loop over the tiles below it.

    Each program then writes one partial sum of the bias gradient, which the caller adds up.
    """
    num_blocks = tl.cdiv(num_columns, BLOCK)
    first = tl.program_id(0) // num_blocks
    columns = ((tl.program_id(0) % num_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = columns < num_columns
    dbias = tl.zeros((ROWS, BLOCK), WIDE)
    if HAS_BIAS:
        bias = tl.load(BIAS + columns, mask=inside, other=0.0).to(WIDE)
    step = tl.num_programs(0) // num_blocks
    for tile in tl.range(first, tl.cdiv(num_rows, ROWS), step, num_stages=3 if HAS_BIAS else 1):
        rows = (tile * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
        here = (rows < num_rows) & inside
        own = rows * num_columns + columns
        incoming = tl.load(DY + rows * dy_stride + columns, mask=here, other=0.0).to(WIDE)
        x = tl.load(X + rows * x_stride + columns, mask=here, other=0.0).to(WIDE)
        if HAS_BIAS:
            x += bias
        sigmoid, slope = _sigmoid(x, SILU)
        y = x * sigmoid
        if HAS_UP:
            up = tl.load(UP + rows * up_stride + columns, mask=here, other=0.0).to(WIDE)
            tl.store(DUP + own, (incoming * y).to(DUP.dtype.element_ty), mask=here)
            incoming *= up
        dx = incoming * (sigmoid + y * (1.0 - sigmoid) * slope)
        tl.store(DX + own, dx.to(DX.dtype.element_ty), mask=here)
        if HAS_BIAS:
            dbias += dx
    if HAS_BIAS:
        tl.store(
            DBIAS + first.to(tl.int64) * num_columns + columns,
            tl.sum(dbias, 0)[None, :],
            mask=inside,
        )


def _launch_forward(kind: str, gate: Tensor, up: Tensor | None, bias: Tensor | None) -> Tensor:
    y, ((x, up), shape, strides) = contiguous_like(gate), _strided(bias, gate, up)
    tile = _tile(shape[1], 2 * TILE if up is None else TILE)
    down, across = _tiles(shape, tile)
    launch(
        activate_forward,
        down * across,
        (x, up, bias, y),
        (*shape, *strides),
        **_flags(kind, x, up, bias),
        **tile,
    )
    return y


def _launch_backward(
    kind: str, dy: Tensor, gate: Tensor, up: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dx, dup, parts = contiguous_like(gate), None if up is None else contiguous_like(gate), None
    (dy, x, up), shape, strides = _strided(bias, dy, gate, up)
    tile = _tile(shape[1], TILE)
    down, across = _tiles(shape, tile)
    if bias is not None:
        down = min(down, max(1, device_programs(x.device, PROGRAMS_PER_SM) // across))
        parts = x.new_empty(down, shape[1], dtype=accumulation_dtype(x))
    launch(
        activate_backward,
        down * across,
        (dy, x, up, bias, dx, dup, parts),
        (*shape, *strides),
        **_flags(kind, x, up, bias),
        **tile,
    )
    return dx, dup, None if bias is None or parts is None else parts.sum(0).to(bias.dtype)


def _tile(columns: int, entries: int) -> dict[str, int]:
    block = min(next_power_of_2(columns), entries)
    return {"ROWS": entries // block, "BLOCK": block, "num_warps": 4}


def _tiles(shape: tuple[int, int], tile: dict[str, int]) -> tuple[int, int]:
    return -(-shape[0] // tile["ROWS"]), -(-shape[1] // tile["BLOCK"])


def _strided(
    bias: Tensor | None, *tensors: Tensor | None
) -> tuple[list[Any], tuple[int, int], list[int]]:
    """(tensors, shape [N, F] that the kernel takes them for, their row strides): `_rows`, without
    views where all entries are one row.
    """
    if _one_row(bias, *tensors):
        numel = next(x.numel() for x in tensors if x is not None)
        return list(tensors), (1, numel), [0] * len(tensors)
    rows = _rows(bias, *tensors)
    strides = [0 if x is None else x.stride(0) for x in rows]
    return rows, tuple(rows[0].shape), strides


def _flags(kind: str, x: Tensor, up: Tensor | None, bias: Tensor | None) -> dict[str, Any]:
    return {
        "SILU": kind == "swiglu",
        "HAS_UP": up is not None,
        "HAS_BIAS": bias is not None,
        "WIDE": accumulation_type(x),
    }


# ---- without Triton: torch.compile ---------------------------------------------------------------


def _recomputed(kind: str, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | float]:
    """(x + bias, sigmoid(z(x)), dz/dx) in fp32 or better."""
    x = at_least_fp32(x) if bias is None else at_least_fp32(x) + bias
    if kind == "swiglu":
        return x, x.sigmoid(), 1.0
    scale = 2 * math.sqrt(2 / math.pi)
    return x, (scale * x * (1 + 0.044715 * x * x)).sigmoid(), scale * (1 + 3 * 0.044715 * x * x)


@torch_compiled
def _forward(kind: str, gate: Tensor, up: Tensor | None, bias: Tensor | None) -> Tensor:
    x, sigmoid, _ = _recomputed(kind, gate, bias)
    return (x * sigmoid if up is None else x * sigmoid * up).to(gate.dtype)


@torch_compiled
def _backward(
    kind: str, dy: Tensor, gate: Tensor, up: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x, sigmoid, slope = _recomputed(kind, gate, bias)
    y, incoming = x * sigmoid, at_least_fp32(dy)
    dup = None if up is None else (incoming * y).to(up.dtype)
    dx = (incoming if up is None else incoming * up) * (sigmoid + y * (1 - sigmoid) * slope)
    return dx.to(gate.dtype), dup, None if bias is None else dx.sum(0).to(bias.dtype)


# ---- the operator --------------------------------------------------------------------------------


def activate(
    kind: str,
    gate: Tensor,
    up: Tensor | None = None,
    bias: Tensor | None = None,
    kernels: str = "fused",
) -> Tensor:
    """Fused activation, differentiable.

    Args:
        kind: swiglu, geglu, gelu or relu.
        gate: [..., F]. Rows may be slices of a fused projection; other strides are copied.
        up: [..., F], multiplied with the activation; for gated kinds only.
        bias: [F], added first; for gelu only.
        kernels: compiled, or fused: Triton where it runs. ReLU is torch's in both.

    Returns:
        [..., F].

    Raises:
        ValueError: Names the tensor that is missing, superfluous, or of an unsupported device,
            dtype or shape.
    """
    _check(kind, gate, up, bias)
    if kind == "relu":
        return F.relu(gate)
    bias = None if bias is None else bias.contiguous()
    y: Tensor = _Activate.apply(kind, gate, up, bias, kernels)
    return y


def _check(kind: str, gate: Tensor, up: Tensor | None, bias: Tensor | None) -> None:
    if kind not in KINDS:
        raise ValueError(f"activate: kind is {kind!r}; legal: {', '.join(KINDS)}")
    if (up is not None) != (kind in GATED):
        shape = None if up is None else tuple(up.shape)
        raise ValueError(
            f"activate: up is {shape} for {kind}; legal: there for {' and '.join(GATED)} alone"
        )
    if bias is not None and kind != "gelu":
        raise ValueError(
            f"activate: bias is {tuple(bias.shape)} for {kind}; legal: there for gelu alone"
        )
    check_tensors("activate", "gate", gate=gate, up=up, bias=bias)
    for name, x in (("gate", gate), ("up", up)):
        if x is not None and (x.dtype != gate.dtype or not x.is_floating_point()):
            raise ValueError(
                f"activate: {name} is {x.dtype}, gate is {gate.dtype}; legal: one floating dtype"
            )
    if gate.ndim == 0:
        raise ValueError("activate: gate has shape (); legal: [..., F]")
    check_shape("activate", "up", up, gate.shape)
    check_shape("activate", "bias", bias, gate.shape[-1:])


class _Activate(torch.autograd.Function):
    """Saves the inputs alone: sigmoid and product are recomputed, which costs less than reading
    them.
    """

    @staticmethod
    def forward(
        ctx: Any, kind: str, gate: Tensor, up: Tensor | None, bias: Tensor | None, kernels: str
    ) -> Tensor:
        ctx.save_for_backward(gate, up, bias)
        ctx.kind, ctx.kernels = kind, kernels
        y: Tensor = activate_op(kind, gate, up, bias, kernels)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, bias = ctx.saved_tensors
        dgate, dup, dbias = activate_backward_op(ctx.kind, dy, gate, up, bias, ctx.kernels)
        return None, dgate, None if up is None else dup, None if bias is None else dbias, None


@fused_operator("activate")
def activate_op(
    kind: str, gate: Tensor, up: Tensor | None, bias: Tensor | None, kernels: str
) -> Tensor:
    """The operator behind `activate`; contiguous result."""
    if gate.numel() == 0:
        return contiguous_like(gate)
    if _triton(gate, kernels):
        return _launch_forward(kind, gate, up, bias)
    x, other = _rows(bias, gate, up)
    y: Tensor = _forward(kind, x, other, bias)
    return y.contiguous().view(gate.shape)


@register_fake(activate_op)
def _(kind: str, gate: Tensor, up: Tensor | None, bias: Tensor | None, kernels: str) -> Tensor:
    return contiguous_like(gate)


@fused_operator("activate_backward")
def activate_backward_op(
    kind: str, dy: Tensor, gate: Tensor, up: Tensor | None, bias: Tensor | None, kernels: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate, up and bias, contiguous; empty tensors for absent inputs."""
    if gate.numel() == 0:
        nothing = _like(gate, up, bias)
        return nothing[0], nothing[1], nothing[2].zero_()
    if _triton(gate, kernels):
        dgate, dup, dbias = _launch_backward(kind, dy, gate, up, bias)
    else:
        incoming, x, other = _rows(bias, dy, gate, up)
        dgate, dup, dbias = _backward(kind, incoming, x, other, bias)
        dgate = dgate.contiguous().view(gate.shape)
        dup = None if dup is None else dup.contiguous().view(gate.shape)
    dup, dbias = (gate.new_empty(0) if x is None else x for x in (dup, dbias))
    return dgate, dup, dbias


@register_fake(activate_backward_op)
def _(
    kind: str, dy: Tensor, gate: Tensor, up: Tensor | None, bias: Tensor | None, kernels: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(gate, up, bias)


def _like(gate: Tensor, up: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    dup, dbias = (gate.new_empty(0) if x is None else contiguous_like(x) for x in (up, bias))
    return contiguous_like(gate), dup, dbias


def _rows(bias: Tensor | None, *tensors: Tensor | None) -> list[Any]:
    """Contiguous rows [N, F], or a single row."""
    whole = _one_row(bias, *tensors)
    rows = [
        x if x is None else x.reshape(1 if whole else -1, x.numel() if whole else x.shape[-1])
        for x in tensors
    ]
    return [x if x is None or x.stride(1) == 1 else x.contiguous() for x in rows]


def _one_row(bias: Tensor | None, *tensors: Tensor | None) -> bool:
    """Whether all entries may be one row: all tensors are contiguous and there is no bias."""
    return bias is None and all(x is None or x.is_contiguous() for x in tensors)


def _triton(gate: Tensor, kernels: str) -> bool:
    return kernels == "fused" and runs_triton(gate.device)
