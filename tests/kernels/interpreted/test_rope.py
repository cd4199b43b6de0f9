"""Rotary positions by the interpreter, in place, against plain operators in fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.canaries import canaries
from workbench.kernels.rope import TILE, reference, rope

TOLERANCE = {torch.float64: 1e-14, torch.float32: 3e-7, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SHAPES = [
    (1, 1, 1, 1, 2),
    (2, 5, 4, 2, 8),
    (3, 7, 5, 1, 6),  # heads and pairs that are no powers of two
    (2, 3, 17, 5, 128),  # more heads than a tile holds
    (3, 11, 3, 3, 34),  # tokens that do not fill the last tile
    (1, 2, 2, 1, 1200),  # one head a tile
]
"""(B, T, H, Hk, K)."""


def tables(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.randn(length, head_dim // 2, dtype=torch.float64)
    return angles.cos(), angles.sin()


def between_canaries(x: Tensor) -> Tensor:
    """A result of an operator, equal to `x`, where a write outside is seen."""
    return torch.empty(x.shape, dtype=x.dtype).copy_(x)


def close(mine: Tensor, true: Tensor, dtype: torch.dtype) -> bool:
    return bool((mine.double() - true).abs().max() <= TOLERANCE[dtype] * true.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_plain_operators(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    b, t, h, hk, d = shape
    given = [torch.randn(b, t, n, d).to(dtype) for n in (h, hk, h, hk)]
    cos, sin = (table.to(dtype) for table in tables(t, d))
    own = [x.clone().requires_grad_() for x in given[:2]]
    incoming = [x.clone() for x in given[2:]]
    with canaries():
        q, k = (between_canaries(x) for x in own)
        turned = rope(q, k, cos, sin)
        assert [x.data_ptr() for x in turned] == [q.data_ptr(), k.data_ptr()]
        torch.autograd.backward(turned, incoming)
    wide = [x.double().requires_grad_() for x in given[:2]]
    true = reference(*wide, cos.double(), sin.double())
    torch.autograd.backward(true, [x.double() for x in incoming])
    for i in range(2):
        assert close(turned[i].detach(), true[i].detach(), dtype) and own[i].grad is not None
        assert close(own[i].grad, wide[i].grad, dtype)
        assert torch.equal(incoming[i], given[2 + i]), "a gradient was overwritten"


@pytest.mark.parametrize("order", ["qkv", "kvq"])
def test_heads_of_a_joint_product_are_turned_where_they_lie(order: str) -> None:
    torch.manual_seed(0)
    b, t, d, num = 2, 5, 8, {"q": 4, "k": 2, "v": 2}
    joint = torch.randn(b, t, sum(num.values()), d, requires_grad=True)
    cos, sin = (table.float() for table in tables(t, d))
    starts = {name: sum(num[other] for other in order[: order.index(name)]) for name in order}
    part = {name: slice(starts[name], starts[name] + num[name]) for name in order}
    with canaries():
        product = between_canaries(joint)
        q, k = rope(product[:, :, part["q"]], product[:, :, part["k"]], cos, sin)
        assert {x.untyped_storage().data_ptr() for x in (q, k)} == {
            product.untyped_storage().data_ptr()
        }
        ((q.square().sum() + 3 * (k * product[:, :, part["v"]]).sum()) / 2).backward()
    true_q, true_k = reference(joint[:, :, part["q"]], joint[:, :, part["k"]], cos, sin)
    assert torch.allclose(q, true_q) and torch.allclose(k, true_k)
    loss = (true_q.square().sum() + 3 * (true_k * joint[:, :, part["v"]]).sum()) / 2
    (true_grad,) = torch.autograd.grad(loss, joint)
    assert joint.grad is not None and torch.allclose(joint.grad, true_grad, atol=1e-6)


def test_any_strides_of_tokens_and_heads_are_taken() -> None:
    cos, sin = (table.float() for table in tables(5, 8))
    q, k = (
        torch.randn(2, 3, 5, 8).transpose(1, 2),
        torch.randn(5, 2, 3, 2, 12)[:, :, 1, :, :8].transpose(0, 1),
    )
    true = reference(q, k, cos, sin)
    for mine, x, expected in zip(rope(q, k, cos, sin), (q, k), true, strict=True):
        assert (
            mine.data_ptr() == x.data_ptr()
            and mine.stride() == x.stride()
            and torch.allclose(mine, expected)
        )


def test_overlapping_tensors_are_copied() -> None:
    cos, sin = (table.float() for table in tables(5, 8))
    spread, repeated = (
        torch.randn(2, 5, 4, 16)[..., ::2],
        torch.randn(2, 5, 1, 8).expand(2, 5, 3, 8),
    )
    windows = torch.randn(2, 5, 14).unfold(2, 8, 2)  # heads that begin every two entries
    for q, k in ((spread, repeated), (repeated, spread), (windows, windows[:, :, :2])):
        before, true = (q.clone(), k.clone()), reference(q, k, cos, sin)
        found = rope(q, k, cos, sin)
        assert all(
            torch.allclose(mine, expected) for mine, expected in zip(found, true, strict=True)
        )
        assert torch.equal(q, before[0]) and torch.equal(k, before[1])


APART = [
    lambda x: (x, x),
    lambda x: (x[:, :, :30], x[:, :, 10:]),
    lambda x: (x[:, :, ::2], x[:, :, 1::2]),
    lambda x: (x[:, :-1], x[:, 1:]),  # the next token's queries are this one's keys
    lambda x: (x, x.transpose(0, 1)),
]


@pytest.mark.parametrize("take", APART)
def test_keys_that_are_queries_too_are_turned_once(
    take: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> None:
    x = torch.randn(
        3, 3, 40, 128
    )  # several tiles a token: what one turns the next would turn again
    given = take(x)
    cos, sin = (table.float() for table in tables(given[0].shape[1], 128))
    true = reference(*given, cos, sin)
    found = rope(*take(x.clone()), cos, sin)
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(found, true, strict=True))


def test_a_gradient_of_any_strides() -> None:
    cos, sin = (table.float() for table in tables(5, 8))
    own = [torch.randn(2, 5, n, 8, requires_grad=True) for n in (3, 2)]
    incoming = (
        torch.randn(2, 3, 5, 8).transpose(1, 2),
        torch.randn(5, 8).expand(2, 2, 5, 8).transpose(1, 2),
    )
    torch.autograd.backward(rope(*(x * 1 for x in own), cos, sin), incoming)
    true = torch.autograd.grad(reference(*own, cos, sin), own, incoming)
    for x, expected in zip(own, true, strict=True):
        assert (
            x.grad is not None
            and x.grad.is_contiguous()
            and torch.allclose(x.grad, expected, atol=1e-6)
        )
    q, k = rope(*(x * 1 for x in own), cos, sin)
    spread = torch.autograd.grad(q.sum() + k.sum(), own)  # one number for all entries
    true = torch.autograd.grad([x.sum() for x in reference(*own, cos, sin)], own)
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(spread, true, strict=True))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_nothing_in_nothing_out(shape: tuple[int, int, int]) -> None:
    b, t, d = shape
    own = [torch.randn(b, t, n, d, requires_grad=True) for n in (2, 1)]
    turned = rope(*(x * 1 for x in own), *tables(t, d))
    torch.autograd.backward(turned, [torch.ones_like(x) for x in turned])
    for x, mine in zip(own, turned, strict=True):
        assert mine.shape == x.shape and x.grad is not None and x.grad.shape == x.shape


def test_heads_too_wide_for_a_tile_are_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []

    def compiled(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool
    ) -> tuple[Tensor, Tensor]:
        taken.append(back)
        return reference(q, k, cos, -sin if back else sin)

    monkeypatch.setattr("workbench.kernels.rope._fresh", compiled)
    for half, expected in ((TILE, []), (TILE + 1, [False, True])):
        q, k = (torch.randn(1, 2, n, 2 * half, requires_grad=True) for n in (2, 1))
        torch.autograd.backward(rope(q * 1, k * 1, *tables(2, 2 * half)), (q.detach(), k.detach()))
        assert taken == expected
