"""Heads without reduction: each token's loss, whose gradient has a factor of its own."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels import linear_cross_entropy as chunked
from workbench.kernels.cross_entropy import cross_entropy
from workbench.kernels.fused_seams import FusedHeadLoss, set_seam
from workbench.models.seams import IGNORE_INDEX, HeadLoss

B, T, D, V = 3, 5, 8, 11
Made = tuple[Tensor, Tensor, Tensor]


def plain(x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    logits = x @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), reduction="none", ignore_index=IGNORE_INDEX
    )
    return loss.view_as(targets)


def made(
    compute: Callable[[Tensor, Tensor, Tensor], Tensor], frozen: bool, dtype: torch.dtype
) -> Made:
    """Losses, and gradients of input and weight, under a factor a token."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, T, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(dtype).requires_grad_(not frozen)
    targets = torch.randint(V, (B, T), generator=generator)
    targets[1, :3] = IGNORE_INDEX
    factors = torch.randn(B, T, generator=generator, dtype=torch.float64)
    losses = compute(x, weight, targets)
    losses.backward(factors.to(losses.dtype))
    assert x.grad is not None
    return losses.detach(), x.grad, x.new_zeros(0) if weight.grad is None else weight.grad


def by_head(kind: str, softcap: float | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def compute(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        if kind == "logits":
            logits = x @ weight.T
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            flat = logits.flatten(0, -2) * 1  # in place of which the gradient is written
            losses = cross_entropy(flat, targets.flatten(), kernels="eager", reduction="none")
            return losses.view_as(targets)
        head = HeadLoss(D, V, softcap)
        del head.weight
        head.weight = weight  # type: ignore[assignment]
        if kind == "chunked":
            set_seam(head, FusedHeadLoss, "eager")
        losses = head(x, targets, "none")
        assert isinstance(losses, Tensor)
        return losses

    return compute


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["plain", "chunked", "logits"])
def test_each_tokens_loss_and_gradient_are_those_of_plain_operators(
    kind: str, frozen: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "loss_chunk_tokens", lambda *_: 4)  # the last chunk has 3
    found = made(by_head(kind, softcap), frozen, torch.float64)
    expected = made(lambda x, w, t: plain(x, w, t, softcap), frozen, torch.float64)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["chunked", "logits"])
def test_small_factors_survive_in_fp16(kind: str) -> None:
    """A factor of 2^-20 a token: fp16 has no number below 2^-24 for its gradient."""

    def scaled(compute: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
        return lambda *operands: compute(*operands) * 2.0**-12

    found = made(scaled(by_head(kind, None)), False, torch.float16)
    exact = made(scaled(lambda x, w, t: plain(x.float(), w.float(), t, None)), False, torch.float16)
    for mine, right in zip(found, exact, strict=True):
        torch.testing.assert_close(mine.float(), right.float(), rtol=2e-2, atol=2.0**-20)


def test_without_tokens_there_is_nothing_to_learn() -> None:
    x = torch.zeros(0, D, requires_grad=True)
    weight = torch.ones(V, D, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.long)
    chunked.linear_cross_entropy(x, weight, empty, reduction="none").sum().backward()
    assert weight.grad is not None and not weight.grad.any()
