"""Weight-only INT8/INT4 GEMV for decoding: few tokens times a quantized weight.

The weight is read once, as stored, and dequantized in registers; sums are in fp32 or better. One
token is multiplied by CUDA cores; several 16-bit tokens by tensor cores, where small integers are
exact. More than `MAX_TOKENS` tokens take the plain path, a GEMM with the weight dequantized in
chunks of rows. Not differentiable.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.backends.compiled_reference import torch_compiled
from workbench.kernels.backends.operator_registration import fused_operator, register_fake
from workbench.kernels.backends.triton_compat import (
    INTERPRETED,
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
from workbench.kernels.weight_quantization import (
    GROUPS,
    PACKED_COLUMNS,
    ZERO_POINT,
    QuantizedWeight,
    as_words,
    check_quantization,
    dequantize_weight,
    quantize_weight,
)

__all__ = [
    "MAX_TOKENS",
    "QuantizedWeight",
    "dequantize_weight",
    "quantize_weight",
    "reference",
    "weight_only_gemv",
]

MAX_TOKENS = 8
"""Tokens up to which a kernel is used."""
FP32_2_POW_23 = 0x4B000000
"""The bits of 2**23 in fp32, whose last mantissa bit counts 1: with a small integer in its low bits
the number is 2**23 plus that integer. So kernels convert integers without slow conversion
instructions. It is an argument because the compiler, knowing the constant, would split the one
instruction that masks and sets bits.
"""
DEQUANTIZE_NUMEL = 2**20
"""Entries of a weight that the plain path dequantizes at once."""


def reference(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """x [..., K] times the dequantized weight, [..., N], in fp64."""
    scales = weight.scales.double()
    zeros = None if weight.zeros is None else weight.zeros.double()
    exact = QuantizedWeight(weight.values, scales, weight.group, weight.bits, zeros)
    return x.double() @ dequantize_weight(exact).t()


# ---- Triton --------------------------------------------------------------------------------------


@jit
def matvec_threads(  # type: ignore[no-untyped-def]
    X,
    W,
    S,
    Z,
    Y,
    num_rows,
    num_columns,
    num_words,
    num_groups,
    FP32_2_POW_23,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    HAS_Z: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    PACKED_COLUMNS: tl.constexpr,
):
    """Some rows of the weight times one token per program; `TOGETHER` words per thread share a
    scale.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    X += tl.program_id(1).to(tl.int64) * num_columns
    Y += tl.program_id(1).to(tl.int64) * num_rows
    total = tl.zeros((ROWS, BLOCK // TOGETHER), WIDE)
    for start in range(0, num_words, BLOCK):
        words = start + tl.arange(0, BLOCK)
        some = start + tl.arange(0, BLOCK // TOGETHER) * TOGETHER
        here = (rows < num_rows)[:, None] & (words < num_words)[None, :]
        stored = tl.load(W + rows[:, None] * num_words + words[None, :], mask=here, other=0)
        if BITS == 8:
            x = tl.load(X + words, mask=words < num_columns, other=0.0).to(WIDE)
            part = _byte(stored).to(WIDE) * x[None, :]
            total += _scaled(
                part,
                x,
                S,
                Z,
                rows,
                some // GROUP,
                num_rows,
                num_groups,
                ZERO_POINT,
                HAS_Z,
                WIDE,
                TOGETHER,
            )
        else:
            low = stored.to(tl.uint32, bitcast=True)
            high = low >> 16
            for g in tl.static_range(PACKED_COLUMNS // GROUP):
                part = tl.zeros((ROWS, BLOCK), WIDE)
                sum_x = tl.zeros((BLOCK,), WIDE)
                for i in tl.static_range(g * (GROUP // 16), (g + 1) * (GROUP // 16)):
                    columns = words // 16 * PACKED_COLUMNS + words % 16 + 16 * i
                    x = tl.load(X + columns, mask=columns < num_columns, other=0.0).to(WIDE)
                    number = _half_byte(low if i < 4 else high, 4 * (i % 4), FP32_2_POW_23)
                    part += number.to(WIDE) * x[None, :]
                    sum_x += x
                groups = some // 16 * (PACKED_COLUMNS // GROUP) + g
                total += _scaled(
                    part,
                    sum_x,
                    S,
                    Z,
                    rows,
                    groups,
                    num_rows,
                    num_groups,
                    ZERO_POINT,
                    HAS_Z,
                    WIDE,
                    TOGETHER,
                )
    tl.store(Y + rows, tl.sum(total, 1).to(Y.dtype.element_ty), mask=rows < num_rows)


@jit
def matvec_cores(  # type: ignore[no-untyped-def]
    X,
    W,
    S,
    Z,
    Y,
    num_tokens,
    num_rows,
    num_columns,
    num_words,
    num_groups,
    num_chunks,
    FP32_2_POW_23,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    HAS_Z: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPAN: tl.constexpr,
    PACKED_COLUMNS: tl.constexpr,
):
    """Some rows times all tokens a program, over some chunks of `PACKED_COLUMNS` columns, each in
    spans of one group.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    own = tl.minimum(rows, num_rows - 1)
    tokens = tl.arange(0, TOKENS)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    first = tl.program_id(1) * num_chunks
    for chunk in tl.range(
        first, tl.minimum(first + num_chunks, tl.cdiv(num_columns, PACKED_COLUMNS)), num_stages=3
    ):
        if BITS == 4:
            words = chunk * 16 + tl.arange(0, 16)
            stored = tl.load(W + own[:, None] * num_words + words[None, :]).to(
                tl.uint32, bitcast=True
            )
        for g in tl.static_range(PACKED_COLUMNS // SPAN):
            columns = chunk * PACKED_COLUMNS + g * SPAN + tl.arange(0, SPAN)
            here = (columns < num_columns)[:, None] & (tokens < num_tokens)[None, :]
            x = tl.load(X + tokens[None, :] * num_columns + columns[:, None], mask=here, other=0.0)
            if BITS == 8:
                at = W + own[:, None] * num_columns + columns[None, :]
                number = _byte(tl.load(at, mask=(columns < num_columns)[None, :], other=0))
            else:
                place = (g * (SPAN // 16) + tl.arange(0, SPAN // 16)) * 4
                number = ((stored[:, None, :] >> place[None, :, None]) & 15) | FP32_2_POW_23
                number = number.to(tl.float32, bitcast=True).reshape(ROWS, SPAN) - (2.0**23 + 8.0)
            part = tl.dot(number.to(PRODUCT), x.to(PRODUCT))
            group = own * num_groups + tl.minimum(
                (chunk * PACKED_COLUMNS + g * SPAN) // GROUP, num_groups - 1
            )
            if HAS_Z:
                zero = tl.load(Z + group).to(tl.float32) - ZERO_POINT
                part -= zero[:, None] * tl.sum(x.to(tl.float32), 0)[None, :]
            total += part * tl.load(S + group).to(tl.float32)[:, None]
    Y += tl.program_id(1).to(tl.int64) * num_tokens * num_rows
    here = (rows < num_rows)[:, None] & (tokens < num_tokens)[None, :]
    tl.store(
        Y + tokens[None, :] * num_rows + rows[:, None], total.to(Y.dtype.element_ty), mask=here
    )


@jit
def _byte(stored):  # type: ignore[no-untyped-def]
    # The byte's highest bit is flipped, which adds 128: -128 becomes 0.
    raised = stored.to(tl.uint8, bitcast=True).to(tl.uint32) ^ (0x4B000000 + 128)
    return raised.to(tl.float32, bitcast=True) - (2.0**23 + 128.0)


@jit
def _half_byte(stored, PLACE: tl.constexpr, FP32_2_POW_23):  # type: ignore[no-untyped-def]
    # Not shifted to the lowest bits: its power of two is removed together with 2**23.
    raised = ((stored & (15 << PLACE)) | FP32_2_POW_23).to(tl.float32, bitcast=True)
    return raised * 2.0**-PLACE - (2.0 ** (23 - PLACE) + 8.0)


@jit
def _scaled(  # type: ignore[no-untyped-def]
    part,
    x,
    S,
    Z,
    rows,
    groups,
    num_rows,
    num_groups,
    ZERO_POINT: tl.constexpr,
    HAS_Z: tl.constexpr,
    WIDE: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Sums of `TOGETHER` neighbours of `part` [rows, words], which is x times numbers as if
    `ZERO_POINT` were zero.
    """
    part = tl.sum(part.reshape(part.shape[0], part.shape[1] // TOGETHER, TOGETHER), 2)
    at = rows[:, None] * num_groups + groups[None, :]
    here = (rows < num_rows)[:, None] & (groups < num_groups)[None, :]
    if HAS_Z:
        zero = tl.load(Z + at, mask=here, other=0.0).to(WIDE) - ZERO_POINT
        part -= zero * tl.sum(x.reshape(x.shape[0] // TOGETHER, TOGETHER), 1)[None, :]
    return part * tl.load(S + at, mask=here, other=0.0).to(WIDE)


# ---- without Triton: the same by a compiler ------------------------------------------------------


@torch_compiled
def _int8_gemv(
    x_MGS: Tensor, values_NGS: Tensor, scales: Tensor, zeros: Tensor | None, num_tokens: int
) -> Tensor:
    """INT8 GEMV by plain operators, per group; scales and zeros [N, groups, 1]."""
    weight = values_NGS.to(x_MGS.dtype)
    weight = (weight if zeros is None else weight - zeros) * scales
    return torch.stack([(x_MGS[i] * weight).sum((1, 2)) for i in range(num_tokens)])


@torch_compiled
def _int4_gemv(
    x_MK: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    per_pack: int,
    num_tokens: int,
) -> Tensor:
    """Of whole `PACKED_COLUMNS`, `per_pack` groups of each. Shapes are numbers, for what is divided
    by a size is slow.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device).view(
        per_pack, 8 // per_pack, 1
    )
    numbers = (words.view(len(words), -1, 1, 1, PACKED_COLUMNS // 8) >> shifts & 15).to(x_MK.dtype)
    shape = len(words), -1, per_pack, 1, 1
    weight = (numbers - (ZERO_POINT[4] if zeros is None else zeros.view(shape))) * scales.view(
        shape
    )
    x = x_MK.view(num_tokens, -1, per_pack, 8 // per_pack, PACKED_COLUMNS // 8)
    return torch.stack([(x[i] * weight).sum((1, 2, 3, 4)) for i in range(num_tokens)])


def _compiled_gemv(x_MK: Tensor, weight: QuantizedWeight) -> Tensor:
    """Few tokens, by torch.compile."""
    values, scales, group, bits, zeros = weight
    x = x_MK.to(accumulation_dtype(x_MK))
    if bits == 8:
        x_MGS, values_NGS = x.unflatten(-1, (-1, group)), values.unflatten(-1, (-1, group))
        zeros = None if zeros is None else zeros.unsqueeze(-1)
        return _int8_gemv(x_MGS, values_NGS, scales.unsqueeze(-1), zeros, len(x)).to(x_MK.dtype)
    per_pack = PACKED_COLUMNS // group
    x = F.pad(x, (0, -x.shape[-1] % PACKED_COLUMNS))
    scales = F.pad(scales, (0, -scales.shape[-1] % per_pack))
    zeros = None if zeros is None else F.pad(zeros, (0, -zeros.shape[-1] % per_pack))
    return _int4_gemv(x, as_words(values), scales, zeros, per_pack, len(x)).to(x_MK.dtype)


def _dequantized_gemm(x_MK: Tensor, weight: QuantizedWeight) -> Tensor:
    """Many tokens: GEMMs with chunks of dequantized rows."""
    y = x_MK.new_empty(len(x_MK), len(weight.values))
    step = max(1, DEQUANTIZE_NUMEL // x_MK.shape[-1])
    for start in range(0, y.shape[1], step):
        own = slice(start, start + step)
        zeros = None if weight.zeros is None else weight.zeros[own]
        part = weight._replace(values=weight.values[own], scales=weight.scales[own], zeros=zeros)
        with torch.autocast(x_MK.device.type, enabled=False):
            y[:, own] = F.linear(x_MK, dequantize_weight(part).to(x_MK.dtype))
    return y


# ---- the operator --------------------------------------------------------------------------------


def weight_only_gemv(x: Tensor, weight: QuantizedWeight, kernels: str = "fused") -> Tensor:
    """x W^T with a quantized weight; not differentiable.

    Args:
        x: [..., K].
        weight: Quantized [N, K].
        kernels: compiled, or fused: Triton where it runs.

    Returns:
        [..., N] in x's dtype.

    Raises:
        ValueError: Names the tensor of an unsupported device, dtype or shape, or that requires a
            gradient.
    """
    values, scales, group, bits, zeros = weight
    check_tensors("weight_only_gemv", "x", x=x, values=values, scales=scales, zeros=zeros)
    check_quantization("weight_only_gemv", x.shape[-1], group, bits)
    for name, y in (("x", x), ("scales", scales), ("zeros", zeros)):
        if y is not None and y.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"weight_only_gemv: {name} requires a gradient, and there is none; legal: under "
                f"torch.no_grad()"
            )
    stored, width = (
        (torch.int8, x.shape[-1])
        if bits == 8
        else (torch.uint8, -(-x.shape[-1] // PACKED_COLUMNS) * PACKED_COLUMNS // 2)
    )
    if values.dtype != stored:
        raise ValueError(
            f"weight_only_gemv: values of {bits} bits are {values.dtype}; legal: {stored}"
        )
    check_shape("weight_only_gemv", "values", values, (len(values), width))
    check_shape("weight_only_gemv", "scales", scales, (len(values), x.shape[-1] // group))
    check_shape("weight_only_gemv", "zeros", zeros, tuple(scales.shape))
    output: Tensor = matvec_op(x, values, scales, zeros, group, bits, kernels)
    return output


@fused_operator("matvec")
def matvec_op(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    bits: int,
    kernels: str,
) -> Tensor:
    """The operator behind `weight_only_gemv`."""
    x_MK = flatten_rows(x)
    shape = *x.shape[:-1], len(values)
    weight = QuantizedWeight(
        values.contiguous(),
        scales.contiguous(),
        group,
        bits,
        None if zeros is None else zeros.contiguous(),
    )
    if not x_MK.numel() or not len(values):
        return x.new_zeros(shape)
    if len(x_MK) > MAX_TOKENS:
        return _dequantized_gemm(x_MK, weight).view(shape)
    if kernels == "fused" and runs_triton(x.device):
        several = len(x_MK) > 1 and x.element_size() == 2 and scales.dtype != torch.float64
        return (_launch_tensor_cores if several else _launch_threads)(x_MK, weight).view(shape)
    return _compiled_gemv(x_MK, weight).view(shape)


@register_fake(matvec_op)
def _(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    bits: int,
    kernels: str,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(values))


def _launch_threads(x_MK: Tensor, weight: QuantizedWeight) -> Tensor:
    words, form = _form(weight)
    y = x_MK.new_empty(len(x_MK), len(words))
    each = 512 if weight.bits == 8 else 128  # words per warp: 16 bytes per thread
    num_warps = min(4, next_power_of_2(-(-words.shape[-1] // each)))
    matvec_threads[(-(-len(words) // 4), len(x_MK))](
        x_MK,
        words,
        weight.scales,
        weight.zeros,
        y,
        len(words),
        x_MK.shape[-1],
        words.shape[-1],
        weight.scales.shape[-1],
        FP32_2_POW_23,
        WIDE=accumulation_type(x_MK),
        ROWS=4,
        BLOCK=each * num_warps,
        TOGETHER=each // 32,
        num_warps=num_warps,
        **form,
    )
    return y


def _launch_tensor_cores(x_MK: Tensor, weight: QuantizedWeight) -> Tensor:
    words, form = _form(weight)
    (num_tokens, num_columns), num_rows = x_MK.shape, len(words)
    # Split-K: where rows alone do not fill the device, columns are split over programs too, whose
    # partial sums are added afterwards.
    row_programs, chunks = -(-num_rows // 32), -(-num_columns // PACKED_COLUMNS)
    num_chunks = -(
        -chunks // min(-(-device_programs(x_MK.device, 8) // row_programs), -(-chunks // 2))
    )
    splits = -(-chunks // num_chunks)
    y = torch.empty(
        splits,
        num_tokens,
        num_rows,
        dtype=x_MK.dtype if splits == 1 else torch.float32,
        device=x_MK.device,
    )
    matvec_cores[(row_programs, splits)](
        x_MK,
        words,
        weight.scales,
        weight.zeros,
        y,
        num_tokens,
        num_rows,
        num_columns,
        words.shape[-1],
        weight.scales.shape[-1],
        num_chunks,
        FP32_2_POW_23,
        PRODUCT=_mma_dtype(x_MK),
        ROWS=32,
        TOKENS=16,
        SPAN=min(form["GROUP"], PACKED_COLUMNS),
        num_warps=2,
        **form,
    )
    return y[0] if splits == 1 else y.sum(0).to(x_MK.dtype)


def _mma_dtype(x: Tensor) -> Any:
    """Input dtype of tensor cores: x's; under the interpreter, which multiplies bf16's bits,
    fp32.
    """
    return tl.float32 if INTERPRETED else tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16


def _form(weight: QuantizedWeight) -> tuple[Tensor, dict[str, int]]:
    """The stored values as int8 or words, and the constants by which a kernel reads them."""
    bits, group = weight.bits, weight.group
    words = weight.values if bits == 8 else as_words(weight.values)
    form = {
        "BITS": bits,
        "ZERO_POINT": ZERO_POINT[bits],
        "HAS_Z": weight.zeros is not None,
        "PACKED_COLUMNS": PACKED_COLUMNS,
    }
    # In a row with one scale every column is of group 0.
    return words, {**form, "GROUP": group if group in GROUPS else 2**30}
