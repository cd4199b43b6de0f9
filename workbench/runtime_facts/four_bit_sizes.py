"""What a frozen weight in 4 bits takes: numbers, a scale for each group of columns, and with double
quantization a factor for each row (QLoRA, Dettmers et al. 2023, arXiv 2305.14314).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

GROUPS = (32, 64, 128)
"""Columns that can share a scale: the paper's 64 for NF4, GPTQ's 128 for INT4 (2210.17323)."""
SCALE_BYTES = 4
"""Of a scale, and of a row's factor: fp32."""
DEQUANTIZE_NUMEL = 2**18
"""Entries that are looked up at once where there is no kernel: 2 MiB beside the dequantized
weight.
"""


class FourBitFormat(NamedTuple):
    """How a weight [..., N, K] is stored in 4 bits.

    Everything about a row follows from that row, and everything about a group of a row, without
    double quantization, from that group: so stored bytes do not depend on which ranks hold which
    rows or groups.
    """

    name: Literal["nf4", "int4"]
    group: int
    """Columns of a row that share a scale."""
    double: bool
    """Whether scales are 8 bits times an fp32 factor of their row, instead of fp32."""

    def number_bytes(self, columns: int) -> int:
        """Bytes of the numbers of so many columns of a row."""
        return columns // 2

    def scale_bytes(self, columns: int) -> int:
        """Bytes of the scales of so many columns of a row."""
        return columns // self.group * (1 if self.double else SCALE_BYTES)

    @property
    def row_factor_bytes(self) -> int:
        """Bytes of what a row has once."""
        return SCALE_BYTES if self.double else 0

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of so many columns."""
        return self.number_bytes(columns) + self.scale_bytes(columns) + self.row_factor_bytes

    def bits_per_parameter(self, columns: int) -> float:
        """Bits of each of a row's so many columns, scales included."""
        return 8 * self.row_bytes(columns) / columns
