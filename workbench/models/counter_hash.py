"""A counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

Random bits are a hash of what they are drawn for: a 64-bit key, a row and a column. Whoever draws
them, in whatever order and of however many, draws the same. Only integer operations of torch are
used, which wrap and are exact on every device; they are 32 bits wide but for one hash a row, since
CPUs multiply 64-bit integers several times more slowly.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ODD = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
"""Constants of splitmix64 (Steele et al. 2014), as signed 64-bit integers."""
_STRIDE, _THIRD, _FOURTH = 0x9E3779B9 - 2**32, 0x7FEB352D, 0x846CA68B - 2**32
"""Constants of a 32-bit finalizer of low bias (Wellons 2018)."""


def row_keys(rows_N: Tensor, key: int) -> Tensor:
    """Two 32-bit keys [N, 2] for each row: a hash of its 64-bit id and the key."""
    mixed = rows_N * _ODD + (key & 2**63 - 1)
    mixed = (mixed ^ ((mixed >> 30) & 2**34 - 1)) * _FIRST
    mixed = (mixed ^ ((mixed >> 27) & 2**37 - 1)) * _SECOND
    return (mixed ^ ((mixed >> 31) & 2**33 - 1))[:, None].view(torch.int32)


def column_counters(first: int, count: int, device: torch.device) -> Tensor:
    """Counters [D] of the columns `first` and after, for `random_bits`."""
    return counters_of(torch.arange(first, first + count, device=device))


def counters_of(columns_D: Tensor) -> Tensor:
    """Counters [D] of columns, for `random_bits`."""
    return columns_D.to(torch.int32) * _STRIDE


def random_bits(
    counters_D: Tensor, keys_N2: Tensor, out: Tensor | None = None, scratch: Tensor | None = None
) -> Tensor:
    """32 random bits, as signed integers [N, D], for each row's keys and each column's counter.

    Args:
        counters_D: Of `column_counters`.
        keys_N2: Of `row_keys`.
        out: Receives the bits; allocated if None.
        scratch: As large as `out`; allocated if None.
    """
    first_N1, second_N1 = keys_N2.split(1, dim=1)
    bits: Tensor = torch.add(counters_D, first_N1, out=out)
    scratch = torch.empty_like(bits) if scratch is None else scratch
    _xor_shifted(bits, 16, scratch).mul_(_THIRD).bitwise_xor_(second_N1)
    _xor_shifted(bits, 15, scratch).mul_(_FOURTH)
    return _xor_shifted(bits, 16, scratch)


def _xor_shifted(x: Tensor, by: int, scratch: Tensor) -> Tensor:
    """`x ^= x >> by`, in place. The shift is logical: torch's is arithmetic and repeats the
    sign.
    """
    torch.bitwise_right_shift(x, by, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_(2 ** (32 - by) - 1))
