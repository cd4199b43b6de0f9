"""How tensor parallelism cuts activations and weights into blocks: 1-D, SUMMA on a q x q grid,
2.5-D and 3-D.

2-D (Optimus, 2104.05343): activations and weights in q x q blocks. 2.5-D (Tesseract, 2105.14500):
weights in q x q blocks that the d layers of a grid hold alike, activations in q d x q. 3-D
(2105.14450): all in l^3 blocks; a rank gathers l of them along one side before it multiplies.
Tokens are split by whole sequences; vectors lie along one side, and are alike along the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.costmodel.inputs.config import Knobs, Number


@dataclass(frozen=True)
class Tiling:
    """Into how many parts each side is cut, and how the blocks of a product meet."""

    tokens: Number = 1.0
    """Parts of an activation's tokens."""
    columns: Number = 1.0
    """Parts of heads, feed-forward and vocabulary."""
    hidden: Number = 1.0
    """Parts of a hidden-wide activation: norms and residuals too."""
    height: Number = 1.0
    """Parts of a weight's other side."""
    steps: Number = 1.0
    """Products of blocks that one product of a rank is made of."""
    gathered: Number = 1.0
    """Blocks of an activation that are multiplied at once."""
    copies: Number = 1.0
    """Ranks that hold the same weights."""

    @property
    def thin(self) -> Number:
        """Share of a column block's other side that a rank holds."""
        return 1 / self.height

    @property
    def vector(self) -> Number:
        """Share of a hidden-wide vector, such as a norm's weight, that a rank holds."""
        return 1 / self.hidden


def tiling(algorithm: str, k: Knobs) -> Tiling:
    """The blocks of `algorithm` on the tensor ranks of candidates `k`."""
    if algorithm == "1d":
        return Tiling(columns=k.tensor)
    side, depth = k.grid
    if algorithm == "3d":
        return Tiling(side * side, side, side, side * side, gathered=side)
    return Tiling(side * depth, side, side, side, steps=side, copies=depth)
