"""Normal numbers by counter: each entry of a global tensor has its own, whoever draws it.

Columns 2p and 2p + 1 of a row are a pair of Box and Muller (1958): two hashes of the row and of p
give the radius and the angle. Only additions, multiplications, divisions, square roots and
conversions are used, each its own operator, which IEEE 754 rounds to one result: CPUs and GPUs
draw the same bits, which logarithms and cosines of their libraries would not (and a CPU's depend
on where in a vector an entry lies). The polynomials' relative errors are below 2^-25, those of
numbers below 6.25 x 2^-24: within 6 ulp of what fp64 makes of the same random bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from workbench.models.counter_hash import column_counters, random_bits, row_keys

CPU_CHUNK_NUMEL, GPU_CHUNK_NUMEL = 2**18, 2**23
"""Numbers drawn at a time: few enough for a CPU's cache, and enough to occupy a GPU."""
SCRATCH_TENSORS = 5
"""Tensors of half a chunk that drawing needs, 4 bytes an entry."""

_LOG = (-0.5975674390792847, -0.7995463609695435, -1.333335518836975)
"""(-2 log((1 + s) / (1 - s)) / s + 4) / s^2, by powers of s^2 from the highest, for |s| <= 0.172.
"""
_SIN = (-3.573704088921659e-05, 0.0024896953254938126, -0.08074532449245453, 0.2853981554508209)
"""sin(x pi/4) / x - 1/2, by powers of x^2, for x <= 1."""
_COS = (
    3.5303378354001325e-06,
    -0.0003259400837123394,
    0.015854327008128166,
    -0.3084251284599304,
    1.0,
)
"""cos(x pi/4), by powers of x^2, for x <= 1."""
_SQRT_HALF = 0x3F3504F3
"""Bits of sqrt(1/2) in fp32."""
_ONE = 0x3F800000
_MANTISSA, _SIGN = 2**23 - 1, -(2**31)


class NormalDrawer:
    """Draws boxes of global tensors, a bounded chunk at a time.

    Args:
        device: Where numbers are drawn; what they fill may lie elsewhere (in host memory).
        chunk_numel: Numbers drawn at a time.
    """

    draws = True
    """Whether what it fills has values afterwards."""

    def __init__(self, device: torch.device, chunk_numel: int = CPU_CHUNK_NUMEL) -> None:
        self.device, self.chunk_numel = device, chunk_numel

    def fill(
        self,
        into: Tensor,
        slices: Sequence[tuple[int, int]],
        shape: Sequence[int],
        key: int,
        deviation: float,
    ) -> None:
        """Fill a box of a global tensor with its normal numbers of mean 0, rounded once from fp32.

        Args:
            into: The box; any strides and dtype.
            slices: [start, stop) of the global tensor along each dim.
            shape: Of the global tensor.
            key: The global tensor's own.
            deviation: Standard deviation.
        """
        for matrix, row, column in matrices(into, slices, shape):
            if matrix.numel():
                self.fill_matrix(matrix, row, column, key, deviation)

    def fill_matrix(
        self, into_RC: Tensor, row: int, column: int, key: int, deviation: float
    ) -> None:
        """Fill [R, C] with the numbers of rows `row` and after, columns `column` and after."""
        rows, columns = chunk_shape(into_RC.shape[0], into_RC.shape[1], self.chunk_numel)
        scratch = self.scratch(rows, columns)
        for c, of_columns in enumerate(into_RC.split(columns, dim=1)):
            for r, part in enumerate(of_columns.split(rows)):
                _fill_chunk(part, row + r * rows, column + c * columns, key, deviation, scratch)

    def scratch(self, rows: int, columns: int) -> Tensor:
        """The temporaries [N] of chunks of at most so many rows and columns."""
        return torch.empty(
            SCRATCH_TENSORS * rows * (columns // 2 + 1), dtype=torch.int32, device=self.device
        )


def chunk_shape(rows: int, columns: int, numel: int) -> tuple[int, int]:
    """Rows and columns of the chunks in which a matrix is drawn: whole rows where they fit."""
    columns = min(columns, numel)
    return min(rows, max(1, numel // columns)), columns


def matrices(
    into: Tensor, slices: Sequence[tuple[int, int]], shape: Sequence[int], row: int = 0
) -> Iterator[tuple[Tensor, int, int]]:
    """(matrix, first row, first column) of each matrix of a box; rows are those of the global
    tensor with all dims but the last flattened.
    """
    if into.ndim < 2:
        yield into.reshape(1, -1), row, slices[0][0] if slices else 0
    elif into.ndim == 2:
        yield into, row + slices[0][0], slices[1][0]
    else:
        below = math.prod(shape[1:-1])
        for index, part in enumerate(into, slices[0][0]):
            yield from matrices(part, slices[1:], shape[1:], row + index * below)


def _fill_chunk(
    into_RC: Tensor, row: int, column: int, key: int, deviation: float, scratch: Tensor
) -> None:
    rows, columns = into_RC.shape
    first, pairs = column // 2, (column + columns + 1) // 2 - column // 2
    parts = scratch[: SCRATCH_TENSORS * rows * pairs].view(SCRATCH_TENSORS, rows, pairs)
    ids = torch.arange(2 * row, 2 * (row + rows), device=scratch.device).view(rows, 2)
    keys = row_keys(ids.t().flatten(), key)
    # Both hashes at once: operators cost microseconds each.
    random_bits(
        column_counters(first, pairs, scratch.device),
        keys,
        parts[:2].flatten(0, 1),
        parts[2:4].flatten(0, 1),
    )
    radius, angle, *three = parts
    scale = _radius(radius, three).mul_(deviation)
    even, odd = _direction(angle, three)
    # A box that begins in an odd column begins with the second number of a pair.
    skip = column % 2
    into_even, into_odd = into_RC[:, skip::2], into_RC[:, 1 - skip :: 2]
    into_even.copy_(even.mul_(scale)[:, skip:][:, : into_even.shape[1]])
    into_odd.copy_(odd.mul_(scale)[:, : into_odd.shape[1]])


def _radius(bits: Tensor, scratch: Sequence[Tensor]) -> Tensor:
    """sqrt(-2 log u) in place of 31 random bits; u = (bits + 1/2) / 2^31 in fp32, within (0, 1].

    2^31 u = 2^k m with m within [sqrt(1/2), sqrt(2)), and log m = log((1 + s) / (1 - s)) with
    s = (m - 1) / (m + 1) (as in FreeBSD's msun, `e_logf.c`).
    """
    whole, exponent, sums = scratch
    mantissa, square = whole.view(torch.float32), exponent.view(torch.float32)
    mantissa.copy_(bits.bitwise_and_(2**31 - 1)).add_(0.5)
    # The shift then leaves k, and the mantissa's bits are as they were.
    whole.add_(_ONE - _SQRT_HALF - ((127 + 31) << 23))
    torch.bitwise_right_shift(whole, 23, out=exponent)
    result = bits.view(torch.float32)
    result.copy_(exponent).mul_(-2 * math.log(2))
    whole.bitwise_and_(_MANTISSA).add_(_SQRT_HALF)
    mantissa.sub_(1.0)
    s = mantissa.div_(torch.add(mantissa, 2.0, out=square))
    log = _polynomial(_LOG, torch.mul(s, s, out=square), sums.view(torch.float32))
    return result.add_(log.mul_(square).mul_(s).add_(s, alpha=-4)).sqrt_()


def _direction(bits: Tensor, scratch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A point of the unit circle for random bits: 24 are its angle within an eighth of the circle,
    3 say which eighth: both signs, and whether the coordinates are swapped.
    """
    first, other, second = scratch
    angle, square = first.view(torch.float32), other.view(torch.float32)
    angle.copy_(torch.bitwise_and(bits, 2**24 - 1, out=other)).mul_(2**-24)
    torch.mul(angle, angle, out=square)
    sine = _polynomial(_SIN, square, second.view(torch.float32)).mul_(angle).add_(angle, alpha=0.5)
    cosine = _polynomial(_COS, square, angle)
    # Swap where bit 29 is set: with d = (first ^ second) & mask, both become themselves ^ d.
    first.bitwise_xor_(second)
    torch.bitwise_left_shift(bits, 2, out=other)
    other.__irshift__(31).bitwise_and_(first)
    second.bitwise_xor_(other)
    first.bitwise_xor_(second)
    first.bitwise_xor_(torch.bitwise_and(bits, _SIGN, out=other))
    torch.bitwise_left_shift(bits, 1, out=other)
    second.bitwise_xor_(other.bitwise_and_(_SIGN))
    return cosine, sine


def _polynomial(coefficients: Sequence[float], x: Tensor, out: Tensor) -> Tensor:
    """Horner's rule, into `out`. `addcmul` would round once on one device and twice on another."""
    torch.mul(x, coefficients[0], out=out)
    for coefficient in coefficients[1:-1]:
        out.add_(coefficient).mul_(x)
    return out.add_(coefficients[-1])
