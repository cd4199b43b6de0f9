"""Rotary positions without a GPU: in place, differentiable, loud where a saved tensor would be
overwritten.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from workbench.kernels.rope import reference, rope, rope_op, turned_op
from workbench.models import seams

B, T, H, HK, D = 2, 5, 3, 1, 6


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    positions = seams.rotary_positions(torch.arange(T) + 3, D, 100.0, dtype)
    return (
        torch.randn(B, T, H, D).to(dtype),
        torch.randn(B, T, HK, D).to(dtype),
        positions.cos,
        positions.sin,
    )


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what autograd does round the operator: every kind of argument would be compiled again."""

    def fresh(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return reference(q, k, cos, -sin if back else sin)

    monkeypatch.setattr("workbench.kernels.rope._fresh", fresh)


def test_the_reference_is_the_models_seam() -> None:
    q, k, cos, sin = inputs()
    true = seams.Rope()(q, k, seams.Positions(torch.arange(T), cos, sin))
    assert all(torch.equal(*pair) for pair in zip(reference(q, k, cos, sin), true, strict=True))
    assert not torch.allclose(true[0], q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernels", ["fused", "compiled"])
def test_turns_in_place(dtype: torch.dtype, kernels: str) -> None:
    q, k, cos, sin = inputs(dtype)
    wide = reference(*(x.double() for x in (q, k, cos, sin)))
    turned = rope(q, k, cos, sin, kernels)
    for mine, x, true in zip(turned, (q, k), wide, strict=True):
        assert mine.data_ptr() == x.data_ptr() and mine.dtype == dtype
        assert (mine.double() - true).abs().max() <= torch.finfo(dtype).eps * true.abs().max()


def heads_of(joint: Tensor, kernels: str = "fused") -> tuple[Tensor, Tensor]:
    _, _, cos, sin = inputs(joint.dtype)
    product = joint * 1
    return rope(product[:, :, :H], product[:, :, H : H + HK], cos, sin, kernels)


@pytest.mark.parametrize("kernels", ["fused", "compiled"])
def test_gradients_are_those_of_differences(kernels: str) -> None:
    joint = torch.randn(B, T, H + 2 * HK, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(partial(heads_of, kernels=kernels), joint)
    turned = heads_of(joint, kernels)
    incoming = [torch.ones(x.shape, dtype=x.dtype) for x in turned]
    torch.autograd.backward(turned, incoming)
    assert all(torch.equal(x, torch.ones_like(x)) for x in incoming), "a gradient was overwritten"


def test_so_are_gradients_of_gradients(uncompiled: None) -> None:
    joint = torch.randn(B, T, H + 2 * HK, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(heads_of, joint)


def attention(x: Tensor, project: Callable[[Tensor], Tensor], turn: Any) -> Tensor:
    """A joint product's heads, turned, and something of all three."""
    _, _, cos, sin = inputs(x.dtype)
    joint = project(x).unflatten(-1, (-1, D))
    q, k = turn(joint[:, :, :H], joint[:, :, H : H + HK], cos, sin)
    loss: Tensor = (q * k * joint[:, :, H + HK :]).square().sum()
    return loss


def test_joint_products_and_checkpoints_are_as_with_plain_operators(uncompiled: None) -> None:
    project, x = nn.Linear(4, (H + 2 * HK) * D), torch.randn(B, T, 4)
    true = torch.autograd.grad(attention(x, project, reference), list(project.parameters()))
    for found in (
        torch.autograd.grad(attention(x, project, rope), list(project.parameters())),
        torch.autograd.grad(
            checkpoint(attention, x, project, rope, use_reentrant=False), list(project.parameters())
        ),
    ):
        assert all(
            torch.allclose(mine, expected, rtol=1e-5)
            for mine, expected in zip(found, true, strict=True)
        )


def test_overwriting_a_saved_tensor_raises(uncompiled: None) -> None:
    q, k, cos, sin = inputs()
    saved = q.requires_grad_().exp()
    turned, _ = rope(saved, k, cos, sin)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        turned.sum().backward()
    joint = torch.ones(B, T, H + 2 * HK, D, dtype=torch.float64, requires_grad=True) * 1
    queries, keys, _ = joint.split([H, HK, HK], 2)
    keys_before = keys.exp()
    turned, _ = rope(queries, keys, cos, sin)
    with pytest.raises(RuntimeError, match="modified inplace"):
        (turned.sum() + keys_before.sum() + keys.sum()).backward()


def test_only_the_tables_are_saved(uncompiled: None) -> None:
    q, k, cos, sin = inputs()
    kept: list[Tensor] = []
    product = q.requires_grad_() + 1
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        rope(product, k, cos, sin)
    assert {x.data_ptr() for x in kept} == {cos.data_ptr(), sin.data_ptr()}


def test_the_operators_pass_torchs_opcheck(uncompiled: None) -> None:
    tests = ("test_schema", "test_faketensor")
    q, k, cos, sin = inputs()
    torch.library.opcheck(rope_op, (q, k, cos, sin, "compiled"), test_utils=tests)
    torch.library.opcheck(turned_op, (q, k, cos, sin, True, "fused"), test_utils=tests)


def test_fake_tensors_take_the_same_path() -> None:
    with FakeTensorMode():
        q, k, cos, sin = inputs(torch.bfloat16)
        own = q.requires_grad_(), k.requires_grad_()
        product = own[0] * 1
        turned = rope(product, own[1] * 1, cos, sin)
        assert turned[0].untyped_storage() is product.untyped_storage()
        sum(x.sum() for x in turned).backward()
        assert all(
            x.grad is not None and x.grad.is_contiguous() and x.grad.shape == x.shape for x in own
        )


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("k", lambda x: x.to("meta"), "k is on meta, but q on cpu"),
        ("q", lambda x: x.long(), "q is int64"),
        ("k", lambda x: x.float(), "k is torch.float32"),
        ("q", lambda x: x[0], r"q has shape \(5, 3, 6\); legal: \[B, T, heads"),
        ("q", lambda x: x[..., :5], "an even head_dim"),
        ("k", lambda x: x[:, 1:], r"k has shape \(2, 4, 1, 6\); legal: \(2, 5, 1, 6\)"),
        ("k", lambda x: x[..., :4], r"k has shape \(2, 5, 1, 4\); legal: \(2, 5, 1, 6\)"),
        ("cos", lambda x: x[:4], r"cos has shape \(4, 3\); legal: \(5, 3\)"),
        ("sin", lambda x: x.repeat(1, 2), r"sin has shape \(5, 6\); legal: \(5, 3\)"),
        ("sin", lambda x: x.requires_grad_(), "sin requires a gradient"),
        ("cos", lambda x: x.to(torch.complex64), "cos is complex64"),
        ("k", lambda x: x.requires_grad_(), "k is a leaf that requires a gradient"),
    ],
)
def test_refusals_name_the_tensor(
    name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    given = dict(zip(("q", "k", "cos", "sin"), inputs(), strict=True))
    with pytest.raises(ValueError, match=message):
        rope(**(given | {name: change(given[name])}))


def test_a_leaf_may_be_rotated_without_autograd(uncompiled: None) -> None:
    q, k, cos, sin = inputs()
    true, _ = reference(q, k, cos, sin)
    with torch.no_grad():
        assert torch.allclose(rope(q.requires_grad_(), k, cos, sin)[0], true)
