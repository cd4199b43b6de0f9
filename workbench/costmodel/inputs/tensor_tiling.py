"""How tensor parallelism cuts activations and weights into blocks: 1-D, SUMMA on a q x q grid,
2.5-D and 3-D.

2-D (Optimus, 2104.05343): activations and weights in q x q blocks. 2.5-D (Tesseract, 2105.14500):
weights in q x q blocks that the d layers of a grid hold alike, activations in q d x q. 3-D
(2105.14450): all in l^3 blocks; a rank gathers l of them along one side before it multiplies.
Tokens are split by whole sequences; vectors lie along one side, and are alike along the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.costmodel.inputs.config import Number, SearchedConfig


@dataclass(frozen=True)
class TensorTiling:
    """Into how many parts each side is cut, and how the blocks of a product meet."""

    token_parts: Number = 1.0
    """Parts of an activation's tokens."""
    column_parts: Number = 1.0
    """Parts of heads, feed-forward and vocabulary."""
    hidden_parts: Number = 1.0
    """Parts of a hidden-wide activation: norms and residuals too."""
    in_dim_parts: Number = 1.0
    """Parts of a weight's other side."""
    num_steps: Number = 1.0
    """Products of blocks that one product of a rank is made of."""
    gathered_blocks: Number = 1.0
    """Blocks of an activation that are multiplied at once."""
    num_weight_copies: Number = 1.0
    """Ranks that hold the same weights."""

    @property
    def in_dim_share(self) -> Number:
        """Share of a column block's other side that a rank holds."""
        return 1 / self.in_dim_parts

    @property
    def vector_share(self) -> Number:
        """Share of a hidden-wide vector, such as a norm's weight, that a rank holds."""
        return 1 / self.hidden_parts


def tensor_tiling(algorithm: str, k: SearchedConfig) -> TensorTiling:
    """The blocks of `algorithm` on the tensor ranks of candidates `k`."""
    if algorithm == "1d":
        return TensorTiling(column_parts=k.tensor)
    side, depth = k.grid
    if algorithm == "3d":
        return TensorTiling(side * side, side, side, side * side, gathered_blocks=side)
    return TensorTiling(side * depth, side, side, side, num_steps=side, num_weight_copies=depth)
