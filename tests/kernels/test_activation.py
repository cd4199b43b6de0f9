"""Activations without a GPU: the models' own functions, their gradients, what is saved and what is
refused.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from workbench.kernels.activation import (
    GATED,
    KINDS,
    activate,
    activate_backward_op,
    activate_op,
    reference,
)
from workbench.models import seams


def inputs(
    shape: tuple[int, ...] = (3, 4, 10), dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    gate, up, bias = (torch.randn(size).to(dtype) for size in (shape, shape, shape[-1:]))
    return gate, up, bias


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_models_seam(kind: str) -> None:
    gate, up, _ = inputs()
    other = up if kind in GATED else None
    assert torch.equal(reference(kind, gate, other), seams.Activate(kind)(gate, other))


@pytest.mark.parametrize("case", ["swiglu", "geglu", "gelu", "gelu with bias", "relu"])
@pytest.mark.parametrize("kernels", ["fused", "compiled"])
def test_gradients_are_those_of_differences(case: str, kernels: str) -> None:
    gate, up, bias = inputs()
    kind = case.split()[0]
    joint = torch.cat((gate, up), -1).requires_grad_()

    def of(joint: Tensor, bias: Tensor | None = None) -> Tensor:
        """The halves of a joint product, none copied."""
        return activate(
            kind, joint[..., :10], joint[..., 10:] if kind in GATED else None, bias, kernels
        )

    tensors = (joint, bias.requires_grad_()) if "bias" in case else (joint,)
    assert torch.autograd.gradcheck(of, tensors)
    true = reference(
        kind, joint[..., :10], joint[..., 10:] if kind in GATED else None, *tensors[1:]
    )
    assert torch.allclose(of(*tensors), true, rtol=1e-12) and of(*tensors).is_contiguous()


@pytest.mark.parametrize("kernels", ["fused", "compiled"])
def test_16_bits_are_rounded_once(kernels: str) -> None:
    gate, up, _ = (x.requires_grad_() for x in inputs((5, 70), torch.bfloat16))
    incoming = torch.randn(5, 70).bfloat16()
    y = activate("swiglu", gate, up, kernels=kernels)
    y.backward(incoming)
    wide = [x.detach().double().requires_grad_() for x in (gate, up)]
    true = reference("swiglu", *wide)
    true.backward(incoming.double())
    for mine, expected in ((y, true), (gate.grad, wide[0].grad), (up.grad, wide[1].grad)):
        assert mine is not None and expected is not None and mine.dtype == torch.bfloat16
        # Half a step of bfloat16, and what fp32 adds.
        assert torch.allclose(mine.double(), expected, rtol=2**-8, atol=1e-6)


def test_only_inputs_are_saved() -> None:
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    gate, up, bias = (x.requires_grad_() for x in inputs())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        activate("swiglu", gate, up)
        activate("gelu", gate, None, bias)
    assert [x.data_ptr() for x in kept] == [
        gate.data_ptr(),
        up.data_ptr(),
        gate.data_ptr(),
        bias.data_ptr(),
    ]


def test_the_operators_pass_torchs_opcheck() -> None:
    tests = ("test_schema", "test_faketensor")
    gate, up, bias = inputs()
    torch.library.opcheck(activate_op, ("swiglu", gate, up, None, "fused"), test_utils=tests)
    torch.library.opcheck(
        activate_backward_op, ("gelu", up, gate, None, bias, "fused"), test_utils=tests
    )
    torch.library.opcheck(
        activate_backward_op, ("swiglu", up, gate, up + 1, None, "fused"), test_utils=tests
    )


@pytest.mark.parametrize("case", ["geglu", "gelu with bias"])
def test_fake_tensors_take_the_same_path(case: str) -> None:
    with FakeTensorMode():
        gate, up, bias = (x.requires_grad_() for x in inputs(dtype=torch.bfloat16))
        y = activate("geglu", gate, up) if case == "geglu" else activate("gelu", gate, None, bias)
        y.sum().backward()
        assert y.shape == gate.shape and y.dtype == torch.bfloat16
        for x in (gate, up if case == "geglu" else bias):
            assert x.grad is not None and x.grad.shape == x.shape and x.grad.is_contiguous()


@pytest.mark.parametrize(
    "kind, change, message",
    [
        ("silu", {}, "kind is 'silu'; legal: swiglu, geglu, gelu, relu"),
        ("gelu", {}, r"up is \(3, 4, 10\) for gelu; legal: there for swiglu and geglu alone"),
        ("swiglu", {"up": lambda x: None}, "up is None for swiglu"),
        (
            "swiglu",
            {"bias": lambda x: x},
            r"bias is \(10,\) for swiglu; legal: there for gelu alone",
        ),
        (
            "relu",
            {"up": lambda x: None, "bias": lambda x: x},
            "for relu; legal: there for gelu alone",
        ),
        ("swiglu", {"up": lambda x: x.to("meta")}, "up is on meta, but gate on cpu"),
        ("geglu", {"up": lambda x: x.float()}, "up is torch.float32, gate is torch.float64"),
        ("geglu", {"gate": lambda x: x.long(), "up": lambda x: x.long()}, "gate is int64"),
        ("geglu", {"up": lambda x: x[..., :9]}, r"up has shape \(3, 4, 9\); legal: \(3, 4, 10\)"),
        (
            "gelu",
            {"up": lambda x: None, "bias": lambda x: x[:1]},
            r"bias has shape \(1,\); legal: \(10,\)",
        ),
        ("gelu", {"up": lambda x: None, "gate": lambda x: x[0, 0, 0]}, r"gate has shape \(\)"),
        (
            "gelu",
            {"up": lambda x: None, "bias": lambda x: x.to(torch.complex64)},
            "bias is complex64",
        ),
    ],
)
def test_refusals_name_the_tensor(
    kind: str, change: dict[str, Callable[[Tensor], Tensor | None]], message: str
) -> None:
    gate, up, bias = inputs()
    given: dict[str, Tensor | None] = {"gate": gate, "up": up, "bias": None}
    for name, of in change.items():
        given[name] = of({"gate": gate, "up": up, "bias": bias}[name])
    with pytest.raises(ValueError, match=message):
        activate(kind, **given)


def test_forward_mode_is_refused() -> None:
    x = torch.ones(2, 4)
    with (
        forward_ad.dual_level(),
        pytest.raises(ValueError, match="activate: gate has a tangent of forward-mode"),
    ):
        activate("swiglu", forward_ad.make_dual(x, x), x)
