"""Split linear layers. A column-split one is a plain `nn.Linear` of fewer outputs behind `copy_to`, unless its input is
gathered from split tokens, or it is shared."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from workbench.parallel.mesh import MeshAxis
from workbench.parallel.tensor.collectives import reduce_from, scatter_tokens, share
from workbench.parallel.tensor.sequence import Entrance, gathered_linear


class RowLinear(nn.Module):
    """y = sum over ranks of x_r W_r^T, + bias once. Weight [out, in / ranks], bias [out] (equal on every rank).

    Of its inputs the first `num_kept` are real; padding has no gradient, whatever comes in there. With `sequence` each
    rank keeps a run of the result's tokens, and its bias' gradient is of those alone.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, axis: MeshAxis, num_kept: int, sequence: bool = False
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.axis = weight, bias, axis
        self.num_kept, self.sequence = num_kept, sequence

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, in / ranks] to [B, T, out], equal on every rank; with `sequence` to [B, T / ranks, out]."""
        padded = self.num_kept < self.weight.shape[1]
        weight = self.weight[:, : self.num_kept] if padded else self.weight
        partial = F.linear(x[..., : self.num_kept] if padded else x, weight)
        y = scatter_tokens(partial, self.axis) if self.sequence else reduce_from(partial, self.axis)
        return y if self.bias is None else y + self.bias


class ColumnLinear(nn.Module):
    """A column-split layer that is no plain one: behind an `entrance` that gathers tokens, or of fewer `pieces` than
    ranks (a key-value head that several ranks need), or both. Weight [out / pieces, in]; `piece` is this rank's."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        axis: MeshAxis,
        piece: int,
        pieces: int,
        entrance: Entrance | None,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.axis = weight, bias, axis
        self.piece, self.pieces, self.entrance = piece, pieces, entrance

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, in] to [B, T, out / pieces], equal on the ranks that share the piece."""
        weight, bias = self._own(self.weight), None if self.bias is None else self._own(self.bias)
        return F.linear(x, weight, bias) if self.entrance is None else gathered_linear(x, weight, bias, self.entrance)

    def _own(self, parameter: Tensor) -> Tensor:
        return parameter if self.pieces == self.axis.size else share(parameter, self.axis, self.piece, self.pieces)
