"""fp8 GEMMs of the blocks' linear layers, by torchao: tensor-wise dynamic scaling.

Parameters, activations and everything that is gathered or sent stay as they are (16 bits); each
operand of a GEMM is cast where it is used, inputs and weights to e4m3 and output gradients to e5m2.
A cast's scale is of the largest entry of the tensor that one device would cast: where ranks hold
parts of it (tensor parallelism: weights, row-parallel inputs, column-parallel output gradients;
context parallelism: inputs and output gradients), their largest entries are all-reduced. Data
parallelism splits no such tensor, and ZeRO gathers weights before they are cast.

Scales are powers of two (torchao's `round_scales_to_power_of_2`), so that sums which round
differently on another mesh still give the same scale.

Where there is no fp8 GEMM (CPU), torchao multiplies what the casts left in fp32 (`emulate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.parallel.mesh import MeshAxis
from workbench.parallel.tensor.tensor_collectives import all_reduce
from workbench.planned_device import on_gpu

Role = Literal["input", "weight", "gradient"]
DTYPE: dict[Role, torch.dtype] = {
    "input": torch.float8_e4m3fn,
    "weight": torch.float8_e4m3fn,
    "gradient": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Float8Layer:
    """A linear layer's name, and the axes whose ranks hold parts of each of its tensors."""

    name: str
    axes: dict[Role, tuple[MeshAxis, ...]]

    def scale_of(self, role: Role, amax: Tensor) -> Tensor:
        """The scale, an fp32 scalar, of a tensor whose largest entry is `amax`."""
        from workbench.parallel.float8.torchao_float8 import amax_to_scale

        scale: Tensor = amax_to_scale(amax, DTYPE[role], round_scales_to_power_of_2=True)
        return scale


class Float8Gemms:
    """The three GEMMs of a layer for one input; `compute_scales` fills the scales, each used
    twice.
    """

    def __init__(self, layer: Float8Layer) -> None:
        self.layer = layer
        self.scales: dict[Role, Tensor] = {}

    def output(self, x: Tensor, weight_OD: Tensor) -> Tensor:
        """x W^T, [..., in] to [..., out]."""
        x_ND = x.flatten(0, -2)
        y_NO = torch.mm(self._cast("input", x_ND), self._cast("weight", weight_OD).t())
        # No view, as of F.linear: partial sums are reduced in place.
        y: Tensor = torch.ops.aten._unsafe_view.default(y_NO, [*x.shape[:-1], y_NO.shape[-1]])
        return y

    def input_gradient(self, gradient_NO: Tensor, weight_OD: Tensor) -> Tensor:
        """g W, [N, in]."""
        return torch.mm(self._cast("gradient", gradient_NO), self._cast("weight", weight_OD))

    def weight_gradient(self, gradient_NO: Tensor, x_ND: Tensor) -> Tensor:
        """g^T x, [out, in]."""
        return torch.mm(self._cast("gradient", gradient_NO).t(), self._cast("input", x_ND))

    def _cast(self, role: Role, x: Tensor) -> Tensor:
        return cast_to_float8(x, self.scales[role], role)


def compute_scales(operands: Sequence[tuple[Float8Gemms, Role, Tensor]]) -> None:
    """Compute the scales of operands, equal on all ranks that hold parts of the same tensor.

    The largest entries of all that an axis shards go into one all-reduce.

    Args:
        operands: The GEMMs that keep the scale, the operand's role there, and the operand.
    """
    from workbench.parallel.float8.torchao_float8 import tensor_to_amax

    found = [tensor_to_amax(x).float() for _, _, x in operands]
    axes = dict.fromkeys(axis for gemms, role, _ in operands for axis in gemms.layer.axes[role])
    for axis in axes:
        own = [i for i, (gemms, role, _) in enumerate(operands) if axis in gemms.layer.axes[role]]
        largest = all_reduce(torch.stack([found[i] for i in own]), axis, dist.ReduceOp.MAX)
        for i, amax in zip(own, largest.unbind()):
            found[i] = amax
    for (gemms, role, _), amax in zip(operands, found):
        gemms.scales[role] = gemms.layer.scale_of(role, amax)


def cast_to_float8(x: Tensor, scale: Tensor, role: Role) -> Tensor:
    """torchao's tensor of `x` in fp8, which its GEMMs take; emulated where there are none."""
    from workbench.parallel.float8 import torchao_float8 as ao

    gemm = ao.ScaledMMConfig(not on_gpu(x), False, False, False)
    config = ao.LinearMMConfig(gemm._replace(use_fast_accum=True), gemm, gemm)
    roles = {
        "input": ao.GemmInputRole.INPUT,
        "weight": ao.GemmInputRole.WEIGHT,
        "gradient": ao.GemmInputRole.GRAD_OUTPUT,
    }
    cast: Tensor = ao.hp_tensor_and_scale_to_float8(x, scale, DTYPE[role], config, roles[role])
    return cast


class _Float8Linear(torch.autograd.Function):
    """y = x W^T; input and weight are saved as they are, and cast again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Float8Layer) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gemms = Float8Gemms(layer)
        compute_scales([(ctx.gemms, "input", x), (ctx.gemms, "weight", weight)])
        y: Tensor = ctx.gemms.output(x, weight)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        gradient_NO = gradient.flatten(0, -2)
        compute_scales([(ctx.gemms, "gradient", gradient_NO)])
        input_gradient = ctx.gemms.input_gradient(gradient_NO, weight).view(x.shape)
        return input_gradient, ctx.gemms.weight_gradient(gradient_NO, x.flatten(0, -2)), None


def float8_linear(x: Tensor, weight: Tensor, layer: Float8Layer) -> Tensor:
    """x W^T in fp8: [..., in] and [out, in] to [..., out]."""
    y: Tensor = _Float8Linear.apply(x, weight, layer)
    return y


class UnshardedFloat8Linear(nn.Module):
    """An `nn.Linear` whose GEMMs are fp8; the bias is added as it is."""

    def __init__(self, linear: nn.Linear, layer: Float8Layer) -> None:
        super().__init__()
        self.weight, self.bias, self.layer = linear.weight, linear.bias, layer

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        y = float8_linear(x, self.weight, self.layer)
        return y if self.bias is None else y + self.bias
