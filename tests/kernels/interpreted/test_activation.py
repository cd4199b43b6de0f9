"""Activations by the interpreter, against plain operators in fp64."""

import pytest
import torch
from torch import Tensor

from tests.kernels.canaries import canaries
from workbench.kernels import activation
from workbench.kernels.activation import GATED, activate, reference

TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
CASES = ["swiglu", "geglu", "gelu", "gelu with bias"]
SHAPES = [(1, 8), (7, 33), (3, 5, 130), (2, 2049), (37, 3), (600, 4), (1,)]


def results(
    case: str,
    tensors: tuple[Tensor, ...],
    incoming: Tensor,
    dtype: torch.dtype,
    plain: bool,
    strided: bool = False,
) -> list[Tensor]:
    """Forward, then the gradients of gate, `up` and bias, those that there are."""
    kind = case.split()[0]
    needed = (True, kind in GATED, "bias" in case)
    own = [
        x.to(dtype).clone().requires_grad_() if needed[i] else None for i, x in enumerate(tensors)
    ]
    gate, up, bias = own
    if strided:  # the two halves of a joint product
        joint = torch.cat(
            [x if x is not None else torch.zeros_like(incoming, dtype=dtype) for x in (gate, up)],
            -1,
        )
        gate = joint[..., : incoming.shape[-1]]
        up = None if up is None else joint[..., incoming.shape[-1] :]
    y = reference(kind, gate, up, bias) if plain else activate(kind, gate, up, bias)
    y.backward(incoming.to(dtype))
    return [y.detach(), *(x.grad for x in own if x is not None and x.grad is not None)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gate, up and bias, and a gradient that comes in: fp64, but what `dtype` can hold."""
    torch.manual_seed(0)
    sizes = (shape, shape, shape[-1:], shape)
    gate, up, bias, incoming = (
        2 * torch.randn(size, dtype=torch.float64).to(dtype).double() for size in sizes
    )
    return (gate, up, bias), incoming


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_plain_operators(dtype: torch.dtype, shape: tuple[int, ...], case: str) -> None:
    tensors, incoming = inputs(shape, dtype)
    true = results(case, tensors, incoming, torch.float64, plain=True)
    for strided in (False, True):
        with canaries():
            found = results(case, tensors, incoming, dtype, plain=False, strided=strided)
        assert len(found) == len(true) == 2 + (case != "gelu")
        for mine, expected in zip(found, true, strict=True):
            assert mine.dtype == dtype and mine.shape == expected.shape
            assert (mine.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_far_from_zero_it_is_the_line_or_nothing(case: str) -> None:
    x = torch.tensor([-1e4, -100.0, -30.0, 30.0, 100.0, 1e4])
    true = results(case, (x, x, 0 * x), torch.ones(6), torch.float64, plain=True)
    for mine, expected in zip(
        results(case, (x, x, 0 * x), torch.ones(6), torch.float32, plain=False), true, strict=True
    ):
        assert torch.allclose(mine.double(), expected, rtol=1e-5, atol=1e-8)


def test_a_programs_own_rows_make_its_part_of_the_bias_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, bias = (
        torch.randn(50, 2050, dtype=torch.float64),
        torch.randn(2050, dtype=torch.float64, requires_grad=True),
    )
    activate("gelu", gate, None, bias).sum().backward()
    true = torch.autograd.grad(reference("gelu", gate, None, bias).sum(), bias)[0]
    assert bias.grad is not None and torch.allclose(bias.grad, true, rtol=1e-12)
    for num_programs in (
        1,
        7,
    ):  # fewer than there are columns' blocks, and a number that divides nothing
        monkeypatch.setattr(activation, "device_programs", lambda device, each, n=num_programs: n)
        again = torch.autograd.grad(activate("gelu", gate, None, bias).sum(), bias)[0]
        assert torch.allclose(again, true, rtol=1e-12)


def test_only_inputs_are_saved() -> None:
    gate, up = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        activate("swiglu", gate, up)
    assert [x.data_ptr() for x in kept] == [gate.data_ptr(), up.data_ptr()]


def test_rows_of_a_joint_product_are_not_copied() -> None:
    joint, alone = torch.randn(6, 4, 40), torch.randn(6, 4, 20)
    for tensors in (
        (joint[..., :20], joint[..., 20:]),
        (alone, joint[..., 20:]),
        (joint[..., :20], alone),
    ):
        rows = activation._rows(None, *tensors)
        assert [x.data_ptr() for x in rows] == [x.data_ptr() for x in tensors]
        own = [x.clone().requires_grad_() for x in tensors]
        y = activate("swiglu", *tensors)
        assert torch.allclose(y, reference("swiglu", *own), atol=1e-6)
        found = activation.activate_backward_op("swiglu", joint[..., 5:25], *tensors, None, "fused")
        true = torch.autograd.grad(reference("swiglu", *own), own, joint[..., 5:25])
        assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(found, true, strict=False))


def test_columns_that_are_apart_are_copied() -> None:
    gate, up = torch.randn(6, 40, 2)[:, ::2, 0], torch.randn(20, 6).t()
    assert torch.allclose(activate("geglu", gate, up), reference("geglu", gate, up), atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (2, 0, 4)], ids=str)
def test_nothing_in_nothing_out(shape: tuple[int, ...]) -> None:
    gate, bias = torch.zeros(shape, requires_grad=True), torch.ones(shape[-1], requires_grad=True)
    y = activate("gelu", gate, None, bias)
    y.sum().backward()
    assert y.shape == shape and gate.grad is not None and gate.grad.shape == shape
    assert bias.grad is not None and not bias.grad.any()
