"""Split linear layers. A column-split one is a plain `nn.Linear` of fewer outputs behind `copy_to`, unless shared."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from workbench.parallel.mesh import MeshAxis
from workbench.parallel.tensor.collectives import reduce_from, share


class RowLinear(nn.Module):
    """y = sum over ranks of x_r W_r^T, + bias once. Weight [out, in / ranks], bias [out] (equal on every rank)."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, axis: MeshAxis) -> None:
        super().__init__()
        self.weight, self.bias, self.axis = weight, bias, axis

    def forward(self, x: Tensor) -> Tensor:
        """[..., in / ranks] to [..., out], equal on every rank."""
        y = reduce_from(F.linear(x, self.weight), self.axis)
        return y if self.bias is None else y + self.bias


class SharedLinear(nn.Module):
    """A column-split layer of fewer pieces than ranks, behind `copy_to`: a key-value head that several ranks need."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, axis: MeshAxis, pieces: int) -> None:
        super().__init__()
        self.weight, self.bias, self.axis, self.pieces = weight, bias, axis, pieces

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out / pieces], equal on the ranks that share the piece."""
        bias = None if self.bias is None else share(self.bias, self.axis, self.pieces)
        return F.linear(x, share(self.weight, self.axis, self.pieces), bias)
