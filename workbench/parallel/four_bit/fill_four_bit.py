"""Fills a rank's shards of 4-bit weights from values that it reads or draws: its own rows only.

A weight's stored bytes follow from the weight alone, whichever ranks hold them: a rank reads the
groups that its bytes belong to; with double quantization, complete rows, for a row's factor is of
all its groups. (Row-parallel shards then read as many times what they hold as there are tensor
ranks.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.adapters.four_bit_tensor import PARTS
from workbench.kernels.four_bit_weight import FourBitWeight, quantize_four_bit
from workbench.parallel.layout import Layout, Slices
from workbench.runtime_facts.four_bit_sizes import FourBitFormat

ReadSlices = Callable[[Tensor, str, tuple[int, ...], Slices], None]
"""Fills a box of a global tensor, given its name, its shape and the box."""
READ_NUMEL = 2**18
"""Values of a weight that are read and quantized at once: some 10 MiB beside the shards."""


class StoredWeight(NamedTuple):
    """A weight that is stored in 4 bits, by its global name and shape [..., N, K]."""

    name: str
    shape: tuple[int, ...]
    form: FourBitFormat


class _Piece(NamedTuple):
    """Bytes [rows, bytes] of a part of one matrix, in a rank's shard."""

    part: int
    """Which of `PARTS`."""
    bytes: Tensor
    rows: tuple[int, int]
    at: tuple[int, int]
    """[start, stop) of the part's bytes of each row."""


class StoredMatrix(NamedTuple):
    """What a rank holds of one matrix of a weight."""

    weight: StoredWeight
    place: Slices
    """Which of stacked matrices it is; empty where there is one."""
    pieces: list[_Piece]
    rows: list[tuple[int, int]]
    """Intervals of the rows that any piece has."""
    columns: tuple[int, int]
    """What its bytes follow from."""

    def boxes(self) -> Iterator[Slices]:
        """The slices of the weight that are read."""
        return ((*self.place, rows, self.columns) for rows in self.rows)


def stored_matrices(
    shards: Mapping[str, Tensor], layouts: Mapping[str, Layout], stored: Mapping[str, StoredWeight]
) -> Iterator[StoredMatrix]:
    """What a rank holds of its 4-bit weights, matrix by matrix.

    Args:
        shards: Local name of a part -> this rank's bytes of it, on any device.
        layouts: Where they lie in the global tensors, by the same names.
        stored: Local name of a weight -> what it is.
    """
    for name, weight in stored.items():
        matrices: dict[tuple[int, ...], list[_Piece]] = {}
        for part, key in enumerate(f"{name}.{part}" for part in PARTS):
            for view, slices in layouts[key].parts(shards[key]) if key in shards else ():
                *stack, rows, at = slices
                for place in product(*(range(*bounds) for bounds in stack)):
                    local = view[tuple(i - first for i, (first, _) in zip(place, stack))]
                    matrices.setdefault(place, []).append(_Piece(part, local, rows, at))
        for place, pieces in matrices.items():
            rows_of_pieces = list(_intervals(piece.rows for piece in pieces))
            columns = _columns(pieces, weight.form, weight.shape[-1])
            at_place = tuple((i, i + 1) for i in place)
            yield StoredMatrix(weight, at_place, pieces, rows_of_pieces, columns)


def fill_four_bit(matrices: Iterable[StoredMatrix], read: ReadSlices, dtype: torch.dtype) -> None:
    """Quantize what a rank holds of its 4-bit weights, in place, some rows at a time.

    Args:
        matrices: What it holds.
        read: Reads or draws values of a weight.
        dtype: Of the values, which rounds them as an unquantized base would be.
    """
    for matrix in matrices:
        weight, (first_column, last_column) = matrix.weight, matrix.columns
        step = max(1, READ_NUMEL // (last_column - first_column))
        for first, last in matrix.rows:
            for start in range(first, last, step):
                rows = start, min(start + step, last)
                box = (*matrix.place, rows, matrix.columns)
                values = torch.empty(
                    [stop - start for start, stop in box],
                    dtype=dtype,
                    device=matrix.pieces[0].bytes.device,
                )
                read(values, weight.name, weight.shape, box)
                quantized = quantize_four_bit(values.view(values.shape[-2:]), weight.form)
                for piece in matrix.pieces:
                    _copy_bytes(piece, quantized, rows, first_column)


def _copy_bytes(
    piece: _Piece, quantized: FourBitWeight, rows: tuple[int, int], first_column: int
) -> None:
    """Copy what a piece has of these rows, quantized from `first_column` on."""
    start, stop = max(rows[0], piece.rows[0]), min(rows[1], piece.rows[1])
    if start >= stop:
        return
    part, form = quantized[piece.part], quantized.form
    assert isinstance(part, Tensor)
    skipped = (form.number_bytes(first_column), form.scale_bytes(first_column), 0)[piece.part]
    source = part[start - rows[0] : stop - rows[0], piece.at[0] - skipped : piece.at[1] - skipped]
    piece.bytes[start - piece.rows[0] : stop - piece.rows[0]].copy_(source)


def _columns(pieces: list[_Piece], form: FourBitFormat, num_columns: int) -> tuple[int, int]:
    """[start, stop) of the columns that the pieces need, in complete groups."""
    if form.double:
        return 0, num_columns
    group_bytes = (form.number_bytes(form.group), form.scale_bytes(form.group))
    starts = [piece.at[0] // group_bytes[piece.part] for piece in pieces]
    stops = [-(-piece.at[1] // group_bytes[piece.part]) for piece in pieces]
    return min(starts) * form.group, max(stops) * form.group


def _intervals(rows: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The rows that any of the pieces has, as few intervals."""
    last: tuple[int, int] | None = None
    for start, stop in sorted(bounds for bounds in rows if bounds[0] < bounds[1]):
        if last is not None and start <= last[1]:
            last = last[0], max(last[1], stop)
            continue
        if last is not None:
            yield last
        last = start, stop
    if last is not None:
        yield last
