"""How tensor parallelism shards activations and weights: 1-D, SUMMA on a q x q grid, 2.5-D and
3-D.

1-D (Megatron-LM, 1909.08053): weights in column or row blocks, activations replicated. 2-D
(Optimus, 2104.05343): activations and weights in q x q blocks. 2.5-D (Tesseract, 2105.14500):
weights in q x q blocks, replicated over the depth d of the grid, activations in q d x q. 3-D
(2105.14450): everything in l^3 blocks, l of which a rank all-gathers along one side before its
GEMM. Tokens are split by whole sequences; vectors are sharded along one side and replicated along
the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.costmodel.inputs.config import Number, SearchedConfig


@dataclass(frozen=True)
class TensorTiling:
    """Number of parts into which each dim is sharded, and how the blocks of one GEMM meet."""

    token_parts: Number = 1.0
    """Shards of the tokens of an activation."""
    column_parts: Number = 1.0
    """Shards of heads, feed-forward and vocabulary."""
    hidden_parts: Number = 1.0
    """Shards of the hidden dim of an activation, norms and residuals included."""
    in_dim_parts: Number = 1.0
    """Shards of the other dim of a weight."""
    num_steps: Number = 1.0
    """GEMMs of blocks that make up one GEMM of a rank: q in SUMMA."""
    gathered_blocks: Number = 1.0
    """Activation blocks that one GEMM all-gathers: l in 3-D."""
    num_weight_copies: Number = 1.0
    """Ranks that hold the same weight block: d in 2.5-D."""

    @property
    def in_dim_share(self) -> Number:
        """Fraction of a column block's other dim that a rank holds."""
        return 1 / self.in_dim_parts

    @property
    def vector_share(self) -> Number:
        """Fraction of a vector as wide as the hidden size, such as a norm's weight, that a rank
        holds.
        """
        return 1 / self.hidden_parts


def tensor_tiling(algorithm: str, k: SearchedConfig) -> TensorTiling:
    """Shard counts of tensor-parallel `algorithm` (1d, 2d, 2.5d, 3d) for candidates `k`."""
    if algorithm == "1d":
        return TensorTiling(column_parts=k.tensor)
    side, depth = k.grid
    if algorithm == "3d":
        return TensorTiling(side * side, side, side, side * side, gathered_blocks=side)
    return TensorTiling(side * depth, side, side, side, num_steps=side, num_weight_copies=depth)
