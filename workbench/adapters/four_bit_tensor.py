"""A frozen weight in 4 bits, as parameters of bytes, and experts' GEMMs with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
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


def dequantized(
    parts: Sequence[Any], form: FourBitFormat | None, dtype: torch.dtype, kernels: str
) -> Tensor:
    """The weight [..., N, K] of saved tensors, in `dtype` where it is stored in 4 bits.

    Args:
        parts: Of a `FourBitWeight`; without `form` the weight alone.
        form: How it is stored; None: in the parameters' dtype.
        dtype: Of the result.
        kernels: What dequantizes it: eager, compiled or fused.
    """
    if form is None:
        (weight,) = parts
        assert isinstance(weight, Tensor)
        return weight
    numbers, scales, row_factors = parts
    return dequantize_four_bit(FourBitWeight(numbers, scales, row_factors, form), dtype, kernels)


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
        weight = dequantized(parts, form, x_RI.dtype, kernels)
        return grouped_linear(x_RI, weight, bias, groups)

    @staticmethod
    def backward(ctx: Any, gradient_RO: Tensor) -> tuple[Tensor | None, ...]:
        weight = dequantized(ctx.saved_tensors, ctx.form, gradient_RO.dtype, ctx.kernels)
        x_gradient = grouped_linear(gradient_RO.contiguous(), weight.mT, None, ctx.groups)
        return x_gradient, *[None] * 7
