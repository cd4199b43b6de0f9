"""INT8 and INT4 weight quantization with a scale per group of columns (LLM.int8(), arXiv
2208.07339; GPTQ, arXiv 2210.17323).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.input_checks import accumulation_dtype, check_tensors

PACKED_COLUMNS = 128
"""Columns whose 4-bit numbers are packed together, in 16 words: column 16 i + j is number i, from
the low bits, of word j. So neighbouring words hold neighbouring columns, and x needs no
permutation.
"""
GROUPS = (32, 64, 128)
ZERO_POINT = {8: 0, 4: 8}
"""Bits -> stored number of zero, where no zeros are given."""


class QuantizedWeight(NamedTuple):
    """A weight [N, K] as (number - zero) * scale, with a scale (and a zero) for each `group`
    columns of a row.
    """

    values: Tensor
    """INT8: int8 [N, K]. INT4: uint8 [N, K / 2], two numbers of 0 to 15 per byte, rows padded to a
    multiple of `PACKED_COLUMNS`.
    """
    scales: Tensor
    """[N, K / group]"""
    group: int
    """K where a row has one scale."""
    bits: int
    zeros: Tensor | None = None
    """[N, K / group], in the scales' dtype."""


def quantize_weight(weight: Tensor, bits: int, group: int | None = None) -> QuantizedWeight:
    """Quantize a weight symmetrically, rounding to nearest.

    The largest absolute value of a group is 127 (INT8) or 7 (INT4) times its scale; scales have the
    weight's dtype.

    Args:
        weight: [N, K].
        bits: 8 or 4.
        group: Columns per scale: 32, 64 or 128, dividing K; None with 8 bits: one scale per row.

    Raises:
        ValueError: Names the unsupported argument.
    """
    check_tensors("quantize_weight", "weight", weight=weight)
    if weight.ndim != 2:
        raise ValueError(f"quantize_weight: weight has {weight.ndim} dimensions; legal: 2, [N, K]")
    columns = weight.shape[-1]
    group = columns if group is None else group
    check_quantization("quantize_weight", columns, group, bits)
    most = 2 ** (bits - 1) - 1
    grouped = weight.detach().to(accumulation_dtype(weight)).unflatten(-1, (-1, group))
    scales = (grouped.abs().amax(-1) / most).to(weight.dtype)
    # In a group of zeros, or of values too small for a scale of their dtype, every number is 0.
    numbers = (
        (grouped / scales.to(grouped.dtype).unsqueeze(-1))
        .nan_to_num(0, 0, 0)
        .round()
        .clamp(-most, most)
    )
    numbers = numbers.flatten(-2)
    return QuantizedWeight(
        numbers.to(torch.int8) if bits == 8 else _pack_int4(numbers), scales, group, bits
    )


def dequantize_weight(weight: QuantizedWeight) -> Tensor:
    """The dequantized weight [N, K], in the scales' dtype."""
    values, scales, group, bits, zeros = weight
    columns = scales.shape[-1] * group
    numbers = values if bits == 8 else _unpack_int4(values).flatten(-3)[..., :columns]
    wide = numbers.unflatten(-1, (-1, group)).to(accumulation_dtype(scales))
    centred = wide - (ZERO_POINT[bits] if zeros is None else zeros.unsqueeze(-1))
    output: Tensor = (centred * scales.unsqueeze(-1)).flatten(-2).to(scales.dtype)
    return output


def _pack_int4(numbers: Tensor) -> Tensor:
    """Pack numbers [N, K] from -8 to 7 into uint8 [N, K / 2]."""
    whole = F.pad(numbers, (0, -numbers.shape[-1] % PACKED_COLUMNS)).to(torch.int32) + ZERO_POINT[4]
    by_place = whole.unflatten(-1, (-1, 8, PACKED_COLUMNS // 8))
    # The shifted numbers have no bit in common, so that their sum is their union; the highest
    # reaches the sign bit.
    shifts = torch.arange(0, 32, 4, device=numbers.device)
    words = (by_place.long() << shifts.unsqueeze(-1)).sum(-2)
    output: Tensor = words.to(torch.int32).flatten(-2).contiguous().view(torch.uint8)
    return output


def as_words(values: Tensor) -> Tensor:
    """INT4 values uint8 [N, K / 2] as words, int32 [N, K / 8]; copied where they are not
    aligned.
    """
    rows = values.contiguous()
    return (rows.clone() if rows.storage_offset() % 4 else rows).view(torch.int32)


def _unpack_int4(values: Tensor) -> Tensor:
    """Unpack uint8 [N, K / 2] into INT4 numbers [N, packs, 8, 16], int32."""
    words = as_words(values).unflatten(-1, (-1, 1, PACKED_COLUMNS // 8))
    output: Tensor = (
        words >> torch.arange(0, 32, 4, dtype=torch.int32, device=values.device).unsqueeze(-1) & 15
    )
    return output


def check_quantization(operator: str, columns: int, group: int, bits: int) -> None:
    """Check that a weight of `columns` columns can have these groups and bits.

    Raises:
        ValueError: Names the argument and what is legal.
    """
    if bits not in ZERO_POINT:
        raise ValueError(f"{operator}: bits is {bits}; legal: 8, 4")
    legal = [
        size
        for size in (*GROUPS, *([columns] if bits == 8 else []))
        if columns and columns % size == 0
    ]
    if group not in legal:
        raise ValueError(
            f"{operator}: group is {group} of {columns} columns; legal: {legal or 'none of them'}"
        )
