"""A layer with an adapter, in one autograd function: its output and gradients are those of plain
operators.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workbench.adapters.frozen_linear import adapted_linear


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("shape", [(2, 5, 8, 6), (3, 0, 8, 6), (0, 8, 6)], ids=str)
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("frozen", [None, 0, 1, 2, 3])
def test_outputs_and_gradients(shape: tuple[int, ...], drops: bool, frozen: int | None) -> None:
    """Of strided inputs and gradients, and of no tokens at all."""
    *tokens, inputs, outputs = shape
    torch.manual_seed(0)
    w = drawn(outputs, inputs).detach()
    operands = [drawn(*tokens, 2 * inputs), drawn(3, inputs), drawn(outputs, 3), drawn(outputs)]
    if frozen is not None:
        operands[frozen].requires_grad_(False)
    source, a, b, bias = operands

    def plain(x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x, w, bias)
        return y + 0.7 * ((0.5 * x if drops else x) @ a.t()) @ b.t()

    def own(x: Tensor) -> Tensor:
        return adapted_linear(x, w, bias, a, b, 0.7, 0.5 * x if drops else None)

    asked = [each for each in operands if each.requires_grad]
    results = []
    for layer in (plain, own):
        y = layer(source[..., ::2])
        factor = torch.linspace(0, 1, y.numel(), dtype=y.dtype).view(y.mT.shape).mT
        results.append((y, *torch.autograd.grad((y * factor).sum(), asked)))
    for wanted, found in zip(*results, strict=True):
        assert wanted.shape == found.shape
        assert torch.allclose(wanted, found, rtol=1e-12, atol=1e-13)
