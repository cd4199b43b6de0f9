"""Weights of 8 or 4 bits: integers, and a scale for each group of columns (2208.07339,
2210.17323).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.input_checks import check, wide_dtype

PACKED = 128
"""Columns whose 4-bit numbers lie together, in 16 words: column 16 i + j of them is number i, from
the low bits, of word j. So neighbouring words hold neighbouring columns, and a program needs no
other order of x.
"""
GROUPS = (32, 64, 128)
CENTRE = {8: 0, 4: 8}
"""By bits, the stored number that stands for zero where no zeros are given."""


class Quantised(NamedTuple):
    """A weight [N, K] as (number - zero) * scale, with a scale (and a zero) for each `group`
    columns of a row.
    """

    values: Tensor
    """int8 [N, K], or of 4 bits uint8 [N, K / 2], two numbers of 0 to 15 a byte, rows padded to
    whole `PACKED`.
    """
    scales: Tensor
    """[N, K / group]"""
    group: int
    """K where a row has one scale."""
    bits: int
    zeros: Tensor | None = None
    """[N, K / group], in the scales' dtype."""


def quantise(weight: Tensor, bits: int, group: int | None = None) -> Quantised:
    """`weight` [N, K] rounded to nearest, symmetrically: the largest of a group is 127 or 7 times
    its scale.

    `group` is 32, 64 or 128 columns, and divides K; with 8 bits None is the whole row. Scales have
    the weight's dtype. Raises ValueError naming what is not right.
    """
    check("quantise", "weight", weight=weight)
    if weight.ndim != 2:
        raise ValueError(f"quantise: weight has {weight.ndim} dimensions; legal: 2, [N, K]")
    columns = weight.shape[-1]
    group = columns if group is None else group
    check_form("quantise", columns, group, bits)
    most = 2 ** (bits - 1) - 1
    grouped = weight.detach().to(wide_dtype(weight)).unflatten(-1, (-1, group))
    scales = (grouped.abs().amax(-1) / most).to(weight.dtype)
    # Of a group of zeros, or of what its dtype has no scale for, every number is 0.
    numbers = (
        (grouped / scales.to(grouped.dtype).unsqueeze(-1))
        .nan_to_num(0, 0, 0)
        .round()
        .clamp(-most, most)
    )
    numbers = numbers.flatten(-2)
    return Quantised(numbers.to(torch.int8) if bits == 8 else _packed(numbers), scales, group, bits)


def dequantise(weight: Quantised) -> Tensor:
    """The weight [N, K] that `weight` stands for, in its scales' dtype."""
    values, scales, group, bits, zeros = weight
    columns = scales.shape[-1] * group
    numbers = values if bits == 8 else _half_bytes(values).flatten(-3)[..., :columns]
    wide = numbers.unflatten(-1, (-1, group)).to(wide_dtype(scales))
    centred = wide - (CENTRE[bits] if zeros is None else zeros.unsqueeze(-1))
    return (centred * scales.unsqueeze(-1)).flatten(-2).to(scales.dtype)


def _packed(numbers: Tensor) -> Tensor:
    """uint8 [N, K / 2] of numbers [N, K] from -8 to 7."""
    whole = F.pad(numbers, (0, -numbers.shape[-1] % PACKED)).to(torch.int32) + CENTRE[4]
    by_place = whole.unflatten(-1, (-1, 8, PACKED // 8))
    # No two numbers have a bit in common, so that a sum is their union; the highest reaches the
    # sign.
    shifts = torch.arange(0, 32, 4, device=numbers.device)
    words = (by_place.long() << shifts.unsqueeze(-1)).sum(-2)
    return words.to(torch.int32).flatten(-2).contiguous().view(torch.uint8)


def words_of(values: Tensor) -> Tensor:
    """4-bit numbers uint8 [N, K / 2] as words, int32 [N, K / 8]; copied where they do not begin at
    one.
    """
    rows = values.contiguous()
    return (rows.clone() if rows.storage_offset() % 4 else rows).view(torch.int32)


def _half_bytes(values: Tensor) -> Tensor:
    """4-bit numbers [N, packs, 8, 16] of uint8 [N, K / 2], int32."""
    words = words_of(values).unflatten(-1, (-1, 1, PACKED // 8))
    return (
        words >> torch.arange(0, 32, 4, dtype=torch.int32, device=values.device).unsqueeze(-1) & 15
    )


def check_form(operator: str, columns: int, group: int, bits: int) -> None:
    """Raise ValueError unless a weight of `columns` may have such groups and bits."""
    if bits not in CENTRE:
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
