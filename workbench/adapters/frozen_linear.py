"""Linear layers of a frozen weight, in the parameters' dtype or in 4 bits, with an adapter or none.

y = x W^T + bias + s (x A^T) B^T is one autograd function: in as few kernels as it has GEMMs, for a
GPU would wait for the host between small ones. Scales are factors of GEMMs, and backward adds the
adapter's share of the input's gradient to the frozen weight's in place.

A weight in 4 bits is dequantized where a GEMM needs it, forward and backward (QLoRA, Dettmers et
al. 2023, arXiv 2305.14314): between the two only the stored bytes are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from workbench.adapters.four_bit_tensor import FourBitTensor, FrozenWeight, dequantized
from workbench.adapters.thin_gemms import rows_of, thin_product
from workbench.kernels.four_bit_weight import FourBitWeight
from workbench.runtime_facts.four_bit_sizes import FourBitFormat


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
    parts, form, kernels = _operands(weight, columns)
    if form is not None:
        numbers, scales, row_factors = parts
        stored = FourBitWeight(numbers, scales, row_factors, form)
        return four_bit_linear(x, stored, bias, kernels)
    (own,) = parts
    if bias is None:
        return F.linear(x, own)
    # `F.linear` returns a view: where an adapter adds to it, autograd would copy its gradient.
    return _shaped_as(torch.addmm(bias, rows_of(x), own.t()), x)


def _operands(
    weight: FrozenWeight, columns: int | None
) -> tuple[Sequence[Any], FourBitFormat | None, str]:
    """(parts, form, kernels) of the first `columns` of a weight, as `dequantized` takes them."""
    if isinstance(weight, FourBitTensor):
        *parts, form = weight.stored(columns)
        return parts, form, weight.kernels
    return [weight if columns is None else weight[:, :columns]], None, ""


def _shaped_as(y_NO: Tensor, x: Tensor) -> Tensor:
    """Rows of a result in the shape of the input, and no view, so that what follows may work in
    place.
    """
    y: Tensor = torch.ops.aten._unsafe_view.default(y_NO, [*x.shape[:-1], y_NO.shape[-1]])
    return y


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
    y: Tensor = _FrozenLinear.apply(x, None, bias, None, None, 1.0, form, kernels, *parts)
    return y


def adapted_linear(
    x: Tensor,
    weight: FrozenWeight,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scale: float,
    dropped: Tensor | None = None,
    columns: int | None = None,
) -> Tensor:
    """x W^T + bias + s (x A^T) B^T, [..., K] to [..., N].

    Args:
        x: [..., K], floating point.
        weight: [N, K], frozen.
        bias: [N].
        a: [rank, K].
        b: [N, rank].
        scale: The s.
        dropped: The adapter's input where it is not x, but x after dropout.
        columns: As `frozen_linear`'s.
    """
    parts, form, kernels = _operands(weight, columns)
    y: Tensor = _FrozenLinear.apply(x, dropped, bias, a, b, scale, form, kernels, *parts)
    return y


class _FrozenLinear(torch.autograd.Function):
    """Gradients of x, bias, A and B, and none of the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        scale: float,
        form: FourBitFormat | None,
        kernels: str,
        *parts: Tensor | None,
    ) -> Tensor:
        x_NK, weight_KN = rows_of(x), dequantized(parts, form, x.dtype, kernels).t()
        y_NO = x_NK @ weight_KN if bias is None else torch.addmm(bias, x_NK, weight_KN)
        down_NR = None
        if a is not None and b is not None:
            down_NR = thin_product(x_NK if dropped is None else rows_of(dropped), a.t())
            y_NO.addmm_(down_NR, b.t(), alpha=scale)
        needs_x = a is not None and dropped is None
        ctx.save_for_backward(x if needs_x else None, dropped, a, b, down_NR, *parts)
        ctx.scale, ctx.form, ctx.kernels = scale, form, kernels
        return _shaped_as(y_NO, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, dropped, a, b, down_NR, *parts = ctx.saved_tensors
        for_x, for_dropped, for_bias, for_a, for_b = ctx.needs_input_grad[:5]
        gradient_NO, scale = rows_of(gradient), ctx.scale
        lead = gradient.shape[:-1]
        x_gradient = dropped_gradient = a_gradient = b_gradient = None
        if for_x:
            x_gradient = gradient_NO @ dequantized(parts, ctx.form, gradient.dtype, ctx.kernels)
        if a is not None:
            down_gradient_NR = thin_product(gradient_NO, b)
            if dropped is None and x_gradient is not None:
                x_gradient.addmm_(down_gradient_NR, a, alpha=scale)
            if for_dropped:
                dropped_gradient = (down_gradient_NR @ a).mul_(scale).view(*lead, a.shape[-1])
            if for_a:
                source_NK = rows_of(x if dropped is None else dropped)
                # `beta=0`: of the first operand only the shape is used.
                a_gradient = torch.addmm(a, down_gradient_NR.t(), source_NK, beta=0, alpha=scale)
            if for_b:
                b_gradient = torch.addmm(b.t(), down_NR.t(), gradient_NO, beta=0, alpha=scale).t()
        bias_gradient = gradient_NO.sum(0) if for_bias else None
        if x_gradient is not None:
            x_gradient = x_gradient.view(*lead, x_gradient.shape[-1])
        found = x_gradient, dropped_gradient, bias_gradient, a_gradient, b_gradient
        return *found, *[None] * (3 + len(parts))
