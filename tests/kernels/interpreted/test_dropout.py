"""Bias, dropout and residual by the interpreter: the model's own entries, to the bit, and plain
operators in fp64.
"""

import pytest
import torch
from torch import Tensor

from tests.kernels.canaries import canaries
from workbench.kernels.bias_dropout_residual import dropout_add, reference
from workbench.models.counter_dropout import apply_dropout, keep_mask
from workbench.models.counter_hash import row_keys

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
KEY = 12345678901234567


def rows_of(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(-(2**62), 2**62, shape[:-1])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "shape, first, rate",
    [((3, 5, 33), 7, 0.1), ((2, 1030), 2**31 - 2000, 0.5), ((1, 2049), 0, 0.97)],
)
@pytest.mark.parametrize("key", [1, 16, KEY, 2**63 - 1])
def test_drops_the_entries_that_the_model_drops(
    dtype: torch.dtype, shape: tuple[int, ...], first: int, rate: float, key: int
) -> None:
    x, rows = torch.randn(shape).to(dtype), rows_of(shape)
    x.view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -0.0])
    with canaries():
        found = dropout_add(x, None, None, rows, key, rate, first)
    true = apply_dropout(x, rows, key, rate, first)
    assert torch.equal(found.isnan(), true.isnan()) and torch.equal(found == 0, true == 0)
    if dtype == torch.bfloat16:  # which the interpreter rounds towards zero, and no device does
        assert torch.allclose(found.float(), true.float(), rtol=2**-7, atol=0, equal_nan=True)
    else:
        assert torch.allclose(found, true, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.signbit(), true.signbit())


@pytest.mark.parametrize("rate", [0.1, 0.75])
def test_entries_at_the_threshold_too(rate: float) -> None:
    rows = torch.arange(5000)
    keys = row_keys(rows, KEY)
    near = keep_mask(keys, 256, rate - 2**-16) != keep_mask(
        keys, 256, rate + 2**-16
    )  # those that the hash's lower half decides
    rows = rows[near.any(1)]
    assert len(rows) > 20
    found = dropout_add(torch.ones(len(rows), 256), None, None, rows, KEY, rate) != 0
    assert torch.equal(found, keep_mask(row_keys(rows, KEY), 256, rate))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (3, 5, 130), (300, 33), (2, 1025)], ids=str)
@pytest.mark.parametrize("with_bias, with_residual", [(True, True), (True, False), (False, True)])
def test_equals_plain_operators(
    dtype: torch.dtype, shape: tuple[int, ...], with_bias: bool, with_residual: bool
) -> None:
    torch.manual_seed(0)
    x, residual, incoming = (torch.randn(shape, dtype=torch.float64).to(dtype) for _ in range(3))
    bias, rows = torch.randn(shape[-1], dtype=torch.float64).to(dtype), rows_of(shape)

    def results(function, dtype: torch.dtype) -> list[Tensor]:  # type: ignore[no-untyped-def]
        chosen = [x, bias if with_bias else None, residual if with_residual else None]
        own = [None if t is None else t.to(dtype).clone().requires_grad_() for t in chosen]
        y = function(*own, rows, KEY, 0.3, 5)
        y.backward(incoming.to(dtype))
        return [y.detach(), *(t.grad for t in own if t is not None)]

    with canaries():
        found = results(dropout_add, dtype)
    for mine, true in zip(found, results(reference, torch.float64), strict=True):
        assert mine.dtype == dtype and mine.shape == true.shape
        assert (mine.double() - true).abs().max() <= TOLERANCE[dtype] * true.abs().max().clamp(
            min=1.0
        )


def test_strided_rows_are_copied() -> None:
    x, residual = torch.randn(6, 40, 2)[:, ::2, 0], torch.randn(20, 6).T
    rows, bias = torch.arange(12)[::2], torch.randn(40)[::2]
    found = dropout_add(x, bias, residual, rows, KEY, 0.5)
    assert torch.allclose(found, reference(x, bias, residual, rows, KEY, 0.5))
    assert (found == residual).any() and (found != residual).any()


def test_nothing_in_nothing_out() -> None:
    x, bias = torch.zeros(0, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    y = dropout_add(x, bias, None, torch.zeros(0, dtype=torch.int64), KEY, 0.5)
    y.sum().backward()
    assert y.shape == (0, 16) and bias.grad is not None and not bias.grad.any()
