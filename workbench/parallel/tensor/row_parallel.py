"""Row-parallel linear layers: sharded by inputs, partial outputs summed over ranks (1909.08053)."""

from __future__ import annotations

from torch import Tensor, nn

from workbench.adapters.four_bit_tensor import FrozenWeight
from workbench.adapters.frozen_linear import frozen_linear
from workbench.adapters.lora_linear import LoraAdapter
from workbench.parallel.float8.float8_linear import Float8Layer, float8_linear
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.tensor.tensor_collectives import reduce_from_tensor_region, scatter_tokens


class RowParallelLinear(nn.Module):
    """y = sum over ranks of x_r W_r^T, + bias once.

    Args:
        weight: [out, in / ranks], padding included.
        bias: [out], equal on every rank; added after the sum.
        axis: The tensor axis.
        num_inputs: Inputs of this rank without padding. Padding is left out of the GEMM, so that it
            has no gradient, whatever the input holds there.
        sequence: Whether the output is reduce-scattered by tokens (sequence parallelism) instead of
            all-reduced; the bias' gradient is then of this rank's tokens only.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        axis: MeshAxis,
        num_inputs: int,
        sequence: bool = False,
    ) -> None:
        super().__init__()
        self.weight: FrozenWeight = weight
        self.bias, self.axis = bias, axis
        self.num_inputs, self.sequence = num_inputs, sequence
        self.float8: Float8Layer | None = None
        self.lora: LoraAdapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, in / ranks] to [B, T, out], or with sequence parallelism [B, T / ranks, out]."""
        padded = self.num_inputs < self.weight.shape[1]
        inputs = x[..., : self.num_inputs] if padded else x
        columns = self.num_inputs if padded else None
        if self.float8 is not None:
            assert isinstance(self.weight, Tensor)
            partial = float8_linear(inputs, self.weight[:, :columns], self.float8)
        elif self.lora is not None:
            partial = self.lora.linear(inputs, self.weight, columns=columns)
        else:
            partial = frozen_linear(inputs, self.weight, columns=columns)
        y = (
            scatter_tokens(partial, self.axis)
            if self.sequence
            else reduce_from_tensor_region(partial, self.axis)
        )
        return y if self.bias is None else y + self.bias
