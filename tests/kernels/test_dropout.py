"""Bias, dropout and residual without a GPU: the model's own operators, their gradients, and what is
refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from workbench.kernels import bias_dropout_residual
from workbench.kernels.bias_dropout_residual import (
    dropout_add,
    dropout_add_backward_op,
    dropout_add_op,
    reference,
)
from workbench.models.counter_dropout import apply_dropout

KEY = 12345678901234567


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, residual, bias = (torch.randn(size).to(dtype) for size in (shape, shape, shape[-1:]))
    return x, bias, residual, torch.randint(-(2**62), 2**62, shape[:-1])


@contextmanager
def saved() -> Iterator[list[Tensor]]:
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield kept


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("kernels", ["fused", "compiled"])
def test_is_the_models_own_dropout(
    dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, bias, residual, rows = inputs((3, 5, 33), dtype)
    monkeypatch.setattr(
        bias_dropout_residual, "DROPOUT_CHUNK_NUMEL", 33 * 4
    )  # 15 rows in four chunks
    found = dropout_add(x, bias, residual, rows, KEY, 0.3, 7, kernels)
    assert torch.equal(found, apply_dropout(x + bias, rows, KEY, 0.3, 7) + residual)
    alone = dropout_add(x, None, None, rows, KEY, 0.3, 7, kernels)
    assert torch.equal(alone, apply_dropout(x, rows, KEY, 0.3, 7)) and alone.dtype == dtype
    assert torch.allclose(
        found.double(),
        reference(x, bias, residual, rows, KEY, 0.3, 7).double(),
        rtol=2e-2,
        atol=2e-2,
    )


@pytest.mark.parametrize("kernels", ["fused", "compiled"])
def test_gradients_are_those_of_differences(kernels: str) -> None:
    x, bias, residual, rows = inputs((2, 3, 7))
    tensors = [t.requires_grad_() for t in (x, bias, residual)]
    assert torch.autograd.gradcheck(lambda *t: dropout_add(*t, rows, KEY, 0.4, 3, kernels), tensors)
    assert torch.autograd.gradcheck(
        lambda t: dropout_add(t, None, None, rows, KEY, 0.4, 3, kernels), tensors[:1]
    )


def test_backward_recomputes_the_mask_of_forward() -> None:
    x, bias, residual, rows = (t.requires_grad_(t.is_floating_point()) for t in inputs((4, 6, 32)))
    with saved() as kept:
        y = dropout_add(x, bias, residual, rows, KEY, 0.5)
    assert [(t.dtype, t.shape) for t in kept] == [(torch.int64, (4, 6))]
    y.sum().backward()
    assert x.grad is not None and bias.grad is not None and residual.grad is not None
    assert torch.equal(x.grad, (y != residual) * 2.0) and torch.equal(bias.grad, x.grad.sum((0, 1)))
    assert torch.equal(residual.grad, torch.ones_like(residual))


def test_a_bias_and_a_residual_in_their_own_dtypes() -> None:
    x, bias, residual, rows = inputs((5, 24), torch.bfloat16)
    wide = [x.requires_grad_(), bias.float().requires_grad_(), residual.float().requires_grad_()]
    y = dropout_add(*wide, rows, KEY, 0.1)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert [t.grad.dtype for t in wide if t.grad is not None] == [
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]


def test_nothing_is_dropped_at_rate_zero() -> None:
    x, bias, residual, rows = inputs((4, 8))
    assert torch.equal(dropout_add(x, bias, residual, rows, KEY, 0.0), x + bias + residual)


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_operators_tell_torch_the_truth(with_bias: bool) -> None:
    x, bias, residual, rows = inputs((2, 3, 16), torch.float32)
    tensors = x, bias if with_bias else None, residual, rows
    torch.library.opcheck(dropout_add_op, (*tensors, KEY, 0.2, 0, "fused"))
    torch.library.opcheck(dropout_add_backward_op, (x, rows, KEY, 0.2, 0, with_bias, "fused"))


def test_runs_on_fake_tensors() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 8, 4096, dtype=torch.bfloat16, requires_grad=True)
        bias = torch.empty(4096, dtype=torch.bfloat16, requires_grad=True)
        rows = torch.empty(2, 8, dtype=torch.int64)
        y = dropout_add(x, bias, torch.empty_like(x), rows, KEY, 0.1)
        y.sum().backward()
        assert y.shape == x.shape and y.dtype == x.dtype
        assert (
            x.grad is not None
            and x.grad.shape == x.shape
            and bias.grad is not None
            and bias.grad.shape == (4096,)
        )


def test_nothing_in_nothing_out() -> None:
    x, bias, residual, rows = inputs((0, 16))
    assert dropout_add(x, bias, residual, rows, KEY, 0.5).shape == (0, 16)


@pytest.mark.parametrize(
    "changed, message",
    [
        (
            {"bias": torch.zeros(8, device="meta")},
            "bias is on meta, but x on cpu; legal: one device",
        ),
        (
            {"residual": torch.zeros(4, 8, dtype=torch.complex64)},
            "residual is complex64; legal: float64",
        ),
        ({"bias": torch.zeros(9)}, r"bias has shape \(9,\); legal: \(8,\)"),
        ({"residual": torch.zeros(4, 9)}, r"residual has shape \(4, 9\); legal: \(4, 8\)"),
        ({"rows": torch.zeros(5, dtype=torch.int64)}, r"rows has shape \(5,\); legal: \(4,\)"),
        ({"rows": torch.zeros(4, dtype=torch.int32)}, "rows is int32; legal: int64"),
        ({"rate": 1.0}, r"rate is 1.0; legal: 0 to 1 - 2\^-32"),
        ({"rate": -0.1}, r"rate is -0.1; legal: 0 to 1 - 2\^-32"),
    ],
)
def test_unsupported_arguments_are_refused_by_name(changed: dict[str, Any], message: str) -> None:
    x, bias, residual, rows = inputs((4, 8), torch.float32)
    given = {
        "x": x,
        "bias": bias,
        "residual": residual,
        "rows": rows,
        "key": KEY,
        "rate": 0.1,
    } | changed
    with pytest.raises(ValueError, match=f"dropout_add: {message}"):
        dropout_add(**given)


def test_the_share_that_stays_is_the_rates_and_its_mean_too() -> None:
    y = dropout_add(torch.ones(64, 4096), None, None, torch.arange(64), KEY, 0.1)
    assert abs((y != 0).double().mean() - 0.9) < 2e-3 and abs(y.double().mean() - 1) < 2e-3
