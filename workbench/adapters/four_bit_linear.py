"""Linear layers on a frozen weight in 4 bits, dequantized where a GEMM needs it (QLoRA, Dettmers et
al. 2023, arXiv 2305.14314).

Forward dequantizes the weight into the input's dtype, and backward again for the gradient of the
input, its only GEMM: between the two only the stored bytes are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.kernels.four_bit_weight import FourBitWeight, dequantize_four_bit
from workbench.models.grouped_gemm import RowGroups, grouped_linear
from workbench.runtime_facts.four_bit_sizes import FourBitFormat

PARTS = ("numbers", "scales", "row_factors")
"""Parameters of a stored weight: the parts of a `FourBitWeight`."""


class FourBitTensor(nn.Module):
    """A frozen weight [..., N, K] in 4 bits, in place of a layer's `weight`: parameters of bytes.

    Args:
        weight: What it replaces, on any device: nothing of it is read but its shape.
        form: How it is stored.
        kernels: What dequantizes it: eager, compiled or fused.
    """

    def __init__(self, weight: Tensor, form: FourBitFormat, kernels: str) -> None:
        super().__init__()
        self.shape, self.form, self.kernels = weight.shape, form, kernels
        *rows, columns = weight.shape
        sizes = form.number_bytes(columns), form.scale_bytes(columns), form.row_factor_bytes
        for name, size in zip(PARTS, sizes):
            part = torch.empty(*rows, size, dtype=torch.uint8, device=weight.device)
            stored = nn.Parameter(part, requires_grad=False) if size else None
            self.register_parameter(name, stored)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def device(self) -> torch.device:
        """Where its bytes are."""
        return self.stored().numbers.device

    def stored(self, columns: int | None = None) -> FourBitWeight:
        """The parts, as bytes.

        Args:
            columns: The first so many, in complete groups; None: all.
        """
        numbers, scales, factors = (getattr(self, name) for name in PARTS)
        if columns is not None and columns < self.shape[-1]:
            numbers = numbers[..., : self.form.number_bytes(columns)]
            scales = scales[..., : self.form.scale_bytes(columns)]
        return FourBitWeight(numbers, scales, factors, self.form)


FrozenWeight = Tensor | FourBitTensor
"""Of a layer with an adapter: in the parameters' dtype, or in 4 bits."""


def frozen_linear(
    x: Tensor, weight: FrozenWeight, bias: Tensor | None = None, columns: int | None = None
) -> Tensor:
    """x W^T + b, [..., K] to [..., N].

    Args:
        x: [..., K], floating point.
        weight: [N, K].
        bias: [N].
        columns: Columns of the weight that x has, where the others are padding; None: all.
    """
    if isinstance(weight, FourBitTensor):
        return four_bit_linear(x, weight.stored(columns), bias, weight.kernels)
    return F.linear(x, weight if columns is None else weight[:, :columns], bias)


def four_bit_linear(
    x: Tensor, weight: FourBitWeight, bias: Tensor | None = None, kernels: str = "fused"
) -> Tensor:
    """`frozen_linear` with a weight in 4 bits.

    Args:
        x: [..., K], floating point.
        weight: [N, K].
        bias: [N].
        kernels: What dequantizes the weight: eager, compiled or fused.
    """
    *parts, form = weight
    y: Tensor = _FourBitLinear.apply(x, bias, form, kernels, *parts)
    return y


def four_bit_grouped_linear(
    x_RI: Tensor, weight: FourBitTensor, bias: Tensor | None, groups: RowGroups
) -> Tensor:
    """`grouped_linear` with weights in 4 bits: rows [R, in], each times its group's weight."""
    *parts, form = weight.stored()
    if bias is not None:
        # No gradient of a frozen bias, and one GEMM for each group.
        assert not bias.requires_grad, "frozen layers have frozen biases"
    y: Tensor = _FourBitGrouped.apply(x_RI, bias, groups, form, weight.kernels, *parts)
    return y


class _FourBitLinear(torch.autograd.Function):
    """y = x W^T + b, whose backward computes the gradients of x and b."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, form: FourBitFormat, kernels: str, *parts: Any
    ) -> Tensor:
        ctx.save_for_backward(*parts)
        ctx.form, ctx.kernels = form, kernels
        weight = dequantize_four_bit(_weight(parts, form), x.dtype, kernels)
        if bias is None:
            return F.linear(x, weight)
        # No view, as `F.linear` with a bias returns: adapters add to it in place.
        y_NO = torch.addmm(bias, x.flatten(0, -2), weight.t())
        y: Tensor = torch.ops.aten._unsafe_view.default(y_NO, [*x.shape[:-1], y_NO.shape[-1]])
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_gradient = bias_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = gradient @ _saved_weight(ctx, gradient.dtype)
        if ctx.needs_input_grad[1]:
            bias_gradient = gradient.flatten(0, -2).sum(0)
        return x_gradient, bias_gradient, *[None] * 5


class _FourBitGrouped(torch.autograd.Function):
    """The same for rows sorted by group; all groups' weights are dequantized at once."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RI: Tensor,
        bias: Tensor | None,
        groups: RowGroups,
        form: FourBitFormat,
        kernels: str,
        *parts: Any,
    ) -> Tensor:
        ctx.save_for_backward(*parts)
        ctx.groups, ctx.form, ctx.kernels = groups, form, kernels
        weight = dequantize_four_bit(_weight(parts, form), x_RI.dtype, kernels)
        return grouped_linear(x_RI, weight, bias, groups)

    @staticmethod
    def backward(ctx: Any, gradient_RO: Tensor) -> tuple[Tensor | None, ...]:
        weight = _saved_weight(ctx, gradient_RO.dtype)
        x_gradient = grouped_linear(gradient_RO.contiguous(), weight.mT, None, ctx.groups)
        return x_gradient, *[None] * 7


def _saved_weight(ctx: Any, dtype: torch.dtype) -> Tensor:
    """The weight whose stored parts forward has saved."""
    return dequantize_four_bit(_weight(ctx.saved_tensors, ctx.form), dtype, ctx.kernels)


def _weight(parts: Sequence[Any], form: FourBitFormat) -> FourBitWeight:
    numbers, scales, row_factors = parts
    return FourBitWeight(numbers, scales, row_factors, form)
