"""Residual + norm by the interpreter, against plain operators in fp64."""

import pytest
import torch
from torch import Tensor

from tests.kernels.canaries import canaries
from workbench.kernels.residual_norm import add_norm, reference

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def results(function, tensors, incoming, dtype: torch.dtype, centred: bool) -> list[Tensor]:  # type: ignore[no-untyped-def]
    own = [None if x is None else x.to(dtype).clone().requires_grad_() for x in tensors]
    y, total = function(*own, 1e-5, centred)
    torch.autograd.backward((y, total), [x.to(dtype) for x in incoming])
    return [y.detach(), total.detach(), *(x.grad for x in own if x is not None)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (7, 33), (3, 5, 130), (2, 1025), (37, 3)], ids=str)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_equals_plain_operators(
    dtype: torch.dtype, shape: tuple[int, ...], centred: bool, with_residual: bool
) -> None:
    torch.manual_seed(0)
    x, residual, *incoming = (torch.randn(shape, dtype=torch.float64) for _ in range(4))
    weight, bias = (
        torch.randn(shape[-1], dtype=torch.float64),
        torch.randn(shape[-1], dtype=torch.float64),
    )
    tensors = [x, residual if with_residual else None, weight, bias if centred else None]
    # What a 16-bit kernel is given is what the reference is given.
    tensors = [None if t is None else t.to(dtype).double() for t in tensors]
    incoming = [t.to(dtype).double() for t in incoming]
    with canaries():
        found = results(add_norm, tensors, incoming, dtype, centred)
    for mine, true in zip(
        found, results(reference, tensors, incoming, torch.float64, centred), strict=True
    ):
        assert (mine.double() - true).abs().max() <= TOLERANCE[dtype] * true.abs().max().clamp(
            min=1.0
        )


def test_strided_rows_are_copied() -> None:
    x = torch.randn(6, 40, 2)[:, ::2, 0].requires_grad_()
    weight = torch.ones(20)
    assert torch.allclose(
        add_norm(x, None, weight, None, 1e-5, False)[0],
        reference(x, None, weight, None, 1e-5, False)[0],
    )


def test_nothing_in_nothing_out() -> None:
    x, weight = torch.zeros(0, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    y, _ = add_norm(x, None, weight, None, 1e-5, False)
    y.sum().backward()
    assert y.shape == (0, 16) and weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize(
    "shape, centred, dtype",
    [((3, 8200), True, torch.float16), ((5, 24), False, torch.float64)],
    ids=str,
)
def test_a_bias_of_wide_rows_and_of_rms_norm(
    shape: tuple[int, ...], centred: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    sizes = (shape, shape, shape[-1:], shape[-1:], shape, shape)
    *tensors, dy, dtotal = (
        torch.randn(size, dtype=torch.float64).to(dtype).double() for size in sizes
    )
    with canaries():
        found = results(add_norm, tensors, [dy, dtotal], dtype, centred)
    for mine, true in zip(
        found, results(reference, tensors, [dy, dtotal], torch.float64, centred), strict=True
    ):
        assert (mine.double() - true).abs().max() <= TOLERANCE[dtype] * true.abs().max()


def test_strided_weights_are_read_in_place() -> None:
    torch.manual_seed(0)
    x, residual, weight, bias = (
        torch.randn(4, 8),
        torch.randn(4, 8),
        torch.randn(16)[::2],
        torch.randn(1).expand(8),
    )
    for centred in (False, True):
        found = add_norm(x, residual, weight, bias, 1e-5, centred)
        for mine, true in zip(
            found, reference(x, residual, weight, bias, 1e-5, centred), strict=True
        ):
            assert torch.allclose(mine, true, atol=1e-5)
