"""Linear layers split by inputs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from workbench.parallel.mesh import MeshAxis
from workbench.parallel.tensor.tensor_collectives import reduce_from, scatter_tokens


class RowLinear(nn.Module):
    """y = sum over ranks of x_r W_r^T, + bias once. Weight [out, in / ranks], bias [out] (equal on
    every rank).

    Of its inputs the first `num_kept` are real; padding has no gradient, whatever comes in there.
    With `sequence` each rank keeps a run of the result's tokens, and its bias' gradient is of those
    alone.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        axis: MeshAxis,
        num_kept: int,
        sequence: bool = False,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.axis = weight, bias, axis
        self.num_kept, self.sequence = num_kept, sequence

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, in / ranks] to [B, T, out], equal on every rank; with `sequence` to [B, T / ranks,
        out].
        """
        padded = self.num_kept < self.weight.shape[1]
        weight = self.weight[:, : self.num_kept] if padded else self.weight
        partial = F.linear(x[..., : self.num_kept] if padded else x, weight)
        y = scatter_tokens(partial, self.axis) if self.sequence else reduce_from(partial, self.axis)
        return y if self.bias is None else y + self.bias
