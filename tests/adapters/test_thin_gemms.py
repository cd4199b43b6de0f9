"""An adapter's GEMMs are those of plain operators, and so are their gradients."""

import pytest
import torch
from torch import Tensor

from workbench.adapters.thin_gemms import add_up_projection, scaled_down_projection


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("shape", [(2, 5, 7, 6), (11, 1, 9), (3, 0, 4)], ids=str)
@pytest.mark.parametrize("frozen", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_outputs_and_gradients(shape: tuple[int, ...], frozen: int | None, biased: bool) -> None:
    *tokens, inputs, outputs = shape
    torch.manual_seed(0)
    w = drawn(outputs, inputs).detach()
    bias = drawn(outputs) if biased else None
    operands = [drawn(*tokens, inputs), drawn(3, inputs), drawn(outputs, 3), drawn(outputs)]
    if frozen is not None:
        operands[frozen].requires_grad_(False)
    x, a, b, factor = operands

    def plain() -> Tensor:
        y = torch.nn.functional.linear(x, w, bias)
        return y + 0.5 * (x @ a.t()) @ b.t()

    def own() -> Tensor:
        y = torch.nn.functional.linear(x, w, bias)
        return add_up_projection(y, scaled_down_projection(x, a, 0.5), b)

    wanted, found = (
        (value, *torch.autograd.grad((value * factor).sin().sum(), asked))
        for value in (plain(), own())
        for asked in [[each for each in operands if each.requires_grad]]
    )
    for one, other in zip(wanted, found, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-13)


def test_it_is_in_place_and_takes_strided_inputs() -> None:
    torch.manual_seed(0)
    x, a, b = drawn(2, 8, 4).detach().transpose(1, 2), drawn(3, 8), drawn(6, 3)
    y = torch.zeros(2, 4, 6, dtype=torch.float64)
    total = add_up_projection(y, scaled_down_projection(x, a, 2.0), b)
    assert total.data_ptr() == y.data_ptr() and total.requires_grad
    assert torch.allclose(y, 2.0 * x @ a.t() @ b.t(), rtol=1e-12)
