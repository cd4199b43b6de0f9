"""Frozen weights in NF4 or INT4, and their dequantization (QLoRA, Dettmers et al. 2023, arXiv
2305.14314).

A value is one of 16 levels times its group's scale. With double quantization a scale is 8 bits,
rounded up, times its row's factor. (The paper's second level subtracts the tensor's mean scale, and
has an fp32 factor for each 256 groups wherever rows end: a rank that holds some rows could not know
it. A row's own factor costs 32 / K bits a parameter instead of 0.002: 4.13 bits with 4,096 columns,
the paper's 4.127.)

All parts are bytes, so that a model's frozen weights share flat buffers of one dtype. A byte has
two neighbouring columns, the first in its low bits. (`weight_quantization` packs INT4 for a GEMV,
in words of 128 columns, which a shard of 32 or 64 columns would cut.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.kernels.backends.kernel_launch import launch
from workbench.kernels.backends.operator_registration import fused_operator, register_fake
from workbench.kernels.backends.triton_compat import jit, runs_triton, tl
from workbench.kernels.input_checks import check_shape
from workbench.runtime_facts.four_bit_sizes import (
    DEQUANTIZE_NUMEL,
    GROUPS,
    SCALE_BYTES,
    FourBitFormat,
)

NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""NormalFloat4: quantiles of the standard normal distribution, an equal number of values each for
normally distributed weights, with an exact zero, scaled to [-1, 1] (arXiv 2305.14314, section 3 and
appendix E).
"""
LEVELS = {"nf4": NF4_LEVELS, "int4": tuple(float(n - 8) for n in range(16))}
LARGEST = {"nf4": 1.0, "int4": 7.0}
"""Level of a group's largest absolute value; INT4 is symmetric, and leaves -8 unused."""
SCALE_STEPS = 255
"""A scale of 8 bits is this where its group has the row's largest."""
TILE = 2048
"""Bytes of numbers per program of the kernel: 16 per thread of 4 warps."""


class FourBitWeight(NamedTuple):
    """A weight [..., N, K] as stored: bytes."""

    numbers: Tensor
    """[..., N, K / 2]"""
    scales: Tensor
    """[..., N, K / group] with double quantization, else the bytes of fp32: [..., N, 4 K /
    group].
    """
    row_factors: Tensor | None
    """[..., N, 4], the bytes of fp32; None without double quantization."""
    form: FourBitFormat


def quantize_four_bit(weight: Tensor, form: FourBitFormat) -> FourBitWeight:
    """Quantize a weight, each value to the nearest level.

    Args:
        weight: [..., N, K], floating point; its values are rounded to fp32 first.
        form: The format, whose groups divide K.

    Raises:
        ValueError: The groups do not divide K.
    """
    check_groups("quantize_four_bit", weight.shape[-1], form.group)
    grouped = weight.detach().float().unflatten(-1, (-1, form.group))
    exact = grouped.abs().amax(-1) / LARGEST[form.name]
    scales, stored, factors = exact, _as_bytes(exact), None
    if form.double:
        factor = exact.amax(-1, keepdim=True) / SCALE_STEPS
        # Rounded up: the largest value of a group stays within the levels.
        steps = (exact / factor).nan_to_num(0, 0, 0).ceil().clamp(max=SCALE_STEPS)
        scales, stored = steps * factor, steps.to(torch.uint8)
        factors = _as_bytes(factor)
    # In a group without a scale every value is 0.
    levels = (grouped / scales.unsqueeze(-1)).nan_to_num(0, 0, 0).flatten(-2)
    numbers = _nearest(levels, form).unflatten(-1, (-1, 2))
    packed = numbers[..., 0] | numbers[..., 1] << 4
    return FourBitWeight(packed, stored, factors, form)


def _as_bytes(x: Tensor) -> Tensor:
    """[..., n] in fp32 as [..., 4 n]; `view` alone refuses some strides of a dim of one entry."""
    return x.flatten().view(torch.uint8).view(*x.shape[:-1], SCALE_BYTES * x.shape[-1])


def _nearest(levels: Tensor, form: FourBitFormat) -> Tensor:
    """Number of the nearest level, uint8; between two of NF4 the lower one."""
    if form.name == "int4":
        return (levels.round().clamp(-7, 7) + 8).to(torch.uint8)
    table = torch.tensor(NF4_LEVELS, device=levels.device)
    number = torch.zeros_like(levels, dtype=torch.uint8)
    for between in ((table[1:] + table[:-1]) / 2).unbind():  # a sixth of `bucketize`'s time
        number += (levels > between).view(torch.uint8)
    return number


def check_groups(operator: str, columns: int, group: int) -> None:
    """Check that groups of so many columns divide a weight's.

    Raises:
        ValueError: Names the group and what is legal.
    """
    legal = [size for size in GROUPS if columns and columns % size == 0]
    if group not in legal:
        found = f"{operator}: group is {group} of {columns} columns"
        raise ValueError(f"{found}; legal: {legal or 'none of them'}")


def reference(weight: FourBitWeight) -> Tensor:
    """The dequantized weight [..., N, K] by plain operators, fp32."""
    table = torch.tensor(LEVELS[weight.form.name], device=weight.numbers.device)
    pairs = torch.stack((weight.numbers & 15, weight.numbers >> 4), -1).flatten(-2)
    levels = table[pairs.long()].unflatten(-1, (-1, weight.form.group))
    output: Tensor = (levels * scales_of(weight).unsqueeze(-1)).flatten(-2)
    return output


def round_to_four_bits(
    values: Tensor, form: FourBitFormat, dtype: torch.dtype | None = None
) -> None:
    """Replace values by what 4 bits leave of them, in place, some rows at a time.

    Args:
        values: [..., N, K] of a weight, complete rows.
        form: The format.
        dtype: What they are rounded to before they are quantized; None: their own.
    """
    rows = values.flatten(0, -2)
    step = max(1, DEQUANTIZE_NUMEL // max(1, rows.shape[-1]))
    for some in rows.split(step):
        some.copy_(reference(quantize_four_bit(some.to(dtype or some.dtype), form)))


def scales_of(weight: FourBitWeight) -> Tensor:
    """The scales [..., N, K / group], fp32."""
    if weight.row_factors is None:
        return weight.scales.view(torch.float32)
    factors: Tensor = weight.row_factors.view(torch.float32)
    return weight.scales.float() * factors


# ---- Triton --------------------------------------------------------------------------------------


@jit
def four_bit_levels(  # type: ignore[no-untyped-def]
    NUMBERS,
    SCALES,
    FACTORS,
    LEVELS,
    OUT,
    num_bytes,
    row_bytes,
    GROUP_BYTES: tl.constexpr,
    DOUBLE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Some bytes of the numbers per program, wherever rows end: groups divide rows, so that a
    byte's group follows from its place alone.
    """
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = at < num_bytes
    stored = tl.load(NUMBERS + at, mask=here, other=0)
    scale = tl.load(SCALES + at // GROUP_BYTES, mask=here, other=0).to(tl.float32)
    if DOUBLE:
        scale *= tl.load(FACTORS + at // row_bytes, mask=here, other=0.0)
    low = tl.load(LEVELS + (stored & 15).to(tl.int32)) * scale
    high = tl.load(LEVELS + (stored >> 4).to(tl.int32)) * scale
    pairs = tl.program_id(0).to(tl.int64) * (2 * TILE) + tl.arange(0, 2 * TILE)
    values = tl.interleave(low, high).to(OUT.dtype.element_ty)
    tl.store(OUT + pairs, values, mask=pairs < 2 * num_bytes)


_tables: dict[tuple[str, torch.device], Tensor] = {}


def _table(name: str, device: torch.device) -> Tensor:
    """The levels on a device, copied there once."""
    if (name, device) not in _tables:
        _tables[name, device] = torch.tensor(LEVELS[name], device=device)
    return _tables[name, device]


def _launch(weight: FourBitWeight, out: Tensor) -> None:
    numbers, scales, factors, form = weight
    if factors is None:
        scales = scales.view(torch.float32)
    launch(
        four_bit_levels,
        -(-numbers.numel() // TILE),
        (
            numbers,
            scales,
            None if factors is None else factors.view(torch.float32),
            _table(form.name, numbers.device),
            out,
        ),
        (numbers.numel(), numbers.shape[-1]),
        GROUP_BYTES=form.group // 2,
        DOUBLE=form.double,
        TILE=TILE,
        num_warps=4,
    )


# ---- without Triton: a table of all pairs of levels ----------------------------------------------


def _look_up(weight: FourBitWeight, out: Tensor) -> None:
    """A complex number is a pair of fp32, and selected as one: three times as fast as by
    `embedding`.
    """
    table = _table(weight.form.name, out.device)
    pairs = torch.complex(table.repeat(16), table.repeat_interleave(16))
    numbers, into = weight.numbers.flatten(0, -2), out.flatten(0, -2)
    scales = scales_of(weight).flatten(0, -2).unsqueeze(-1)
    step = max(1, DEQUANTIZE_NUMEL // out.shape[-1])
    for start in range(0, len(into), step):
        own = slice(start, start + step)
        values = torch.view_as_real(pairs.index_select(0, numbers[own].flatten().int()))
        values = values.view(-1, scales.shape[1], weight.form.group).mul_(scales[own])
        into[own].copy_(values.flatten(-2))


# ---- the operator --------------------------------------------------------------------------------


def dequantize_four_bit(
    weight: FourBitWeight, dtype: torch.dtype, kernels: str = "fused"
) -> Tensor:
    """The dequantized weight [..., N, K], in fp32 and rounded once; not differentiable.

    Args:
        weight: As stored.
        dtype: Of the result.
        kernels: eager or compiled: plain operators; fused: Triton where it runs.

    Raises:
        ValueError: Names a part of another shape or dtype.
    """
    numbers, scales, factors, form = weight
    columns = 2 * numbers.shape[-1]
    check_groups("dequantize_four_bit", columns, form.group)
    for name, part in (("numbers", numbers), ("scales", scales), ("row_factors", factors)):
        if part is not None and part.dtype != torch.uint8:
            raise ValueError(f"dequantize_four_bit: {name} are {part.dtype}; legal: torch.uint8")
        if part is not None and part.device != numbers.device:
            where = f"{name} is on {part.device}, but numbers on {numbers.device}"
            raise ValueError(f"dequantize_four_bit: {where}; legal: one device")
    rows = tuple(numbers.shape[:-1])
    check_shape("dequantize_four_bit", "scales", scales, (*rows, form.scale_bytes(columns)))
    check_shape("dequantize_four_bit", "row_factors", factors, (*rows, form.row_factor_bytes))
    if (factors is None) == form.double:
        wanted = "bytes" if form.double else "None"
        raise ValueError(f"dequantize_four_bit: row_factors of {form} are not {wanted}")
    output: Tensor = four_bit_op(numbers, scales, factors, form.name, form.group, dtype, kernels)
    return output


@fused_operator("four_bit")
def four_bit_op(
    numbers: Tensor,
    scales: Tensor,
    row_factors: Tensor | None,
    name: str,
    group: int,
    dtype: torch.dtype,
    kernels: str,
) -> Tensor:
    """The operator behind `dequantize_four_bit`."""
    form: Any = FourBitFormat(name, group, row_factors is not None)  # type: ignore[arg-type]
    factors = None if row_factors is None else row_factors.contiguous()
    weight = FourBitWeight(numbers.contiguous(), scales.contiguous(), factors, form)
    out = _new_output(numbers, dtype)
    if out.numel():
        (_launch if kernels == "fused" and runs_triton(out.device) else _look_up)(weight, out)
    return out


@register_fake(four_bit_op)
def _(
    numbers: Tensor,
    scales: Tensor,
    row_factors: Tensor | None,
    name: str,
    group: int,
    dtype: torch.dtype,
    kernels: str,
) -> Tensor:
    return _new_output(numbers, dtype)


def _new_output(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Two columns for each byte."""
    return numbers.new_empty(*numbers.shape[:-1], 2 * numbers.shape[-1], dtype=dtype)
