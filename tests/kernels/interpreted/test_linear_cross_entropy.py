"""Projection and loss in chunks by the interpreter, against plain operators in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.canaries import canaries
from workbench.kernels import cross_entropy
from workbench.kernels import linear_cross_entropy as module
from workbench.kernels.linear_cross_entropy import linear_cross_entropy, reference
from workbench.models.seams import IGNORE_INDEX
from workbench.runtime_facts import loss_chunks
from workbench.runtime_facts.loss_chunks import loss_chunk_tokens

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
WIDTH = 16


def drawn(tokens: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    targets[1:2] = IGNORE_INDEX
    return x.to(dtype), weight.to(dtype), targets


def results(function: Any, x: Tensor, weight: Tensor, targets: Tensor, **form: Any) -> list[Tensor]:
    own = [t.clone().requires_grad_() for t in (x, weight)]
    loss = function(*own, targets, **form)
    return [loss.detach(), *torch.autograd.grad(loss * 0.75, own)]


def assert_equal(found: list[Tensor], true: list[Tensor], dtype: torch.dtype) -> None:
    for mine, other in zip(found, true, strict=True):
        assert (mine.double() - other).abs().max() <= TOLERANCE[dtype] * other.abs().max().clamp(
            min=0.1
        )


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 64 tokens, and rows that are read in several blocks."""
    monkeypatch.setattr(loss_chunks, "LOSS_MIN_CHUNK_TOKENS", 64)
    monkeypatch.setattr(module, "TILE_NUMEL", 256)
    monkeypatch.setattr(cross_entropy, "BLOCK", 256)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 300), (70, 33)], ids=str)
@pytest.mark.parametrize("form", [{}, {"smoothing": 0.2, "z": 1e-3}], ids=str)
def test_equals_plain_operators(
    short_runs: None, dtype: torch.dtype, shape: tuple[int, int], form: dict[str, float]
) -> None:
    x, weight, targets = drawn(*shape, dtype)
    with canaries():
        found = results(linear_cross_entropy, x, weight, targets, **form)
    assert_equal(found, results(reference, x.double(), weight.double(), targets, **form), dtype)


def test_there_are_several_runs(short_runs: None) -> None:
    assert loss_chunk_tokens(70, WIDTH, 33) == 64


def test_a_row_in_two_blocks_of_the_real_size() -> None:
    x, weight, targets = drawn(2, module.TILE_NUMEL + 700, torch.float32)
    with canaries():
        found = results(linear_cross_entropy, x, weight, targets)
    assert_equal(found, results(reference, x.double(), weight.double(), targets), torch.float32)


def test_a_target_outside_the_vocabulary_spoils_its_token_alone() -> None:
    x, weight, targets = drawn(5, 33, torch.float32)
    targets[2] = 33
    loss, dx, dw = results(linear_cross_entropy, x, weight, targets)
    assert loss.isnan() and dx[2].isnan().all() and dw.isnan().all()
    targets[2] = IGNORE_INDEX
    others = [0, 1, 3, 4]
    true = results(reference, x.double(), weight.double(), targets)[1]
    assert torch.allclose(dx[others].double(), true[others], atol=1e-5)


def test_all_ignored_and_none_at_all() -> None:
    for tokens in (7, 0):
        x, weight, _ = drawn(tokens, 33, torch.float32)
        found = results(linear_cross_entropy, x, weight, torch.full((tokens,), IGNORE_INDEX))
        assert not any(t.any() for t in found) and found[1].shape == x.shape


@pytest.mark.parametrize(
    "targets", [torch.arange(14)[::2] % 5, torch.tensor([3]).expand(7)], ids=["apart", "one"]
)
def test_targets_lie_anywhere(targets: torch.Tensor) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 6), torch.randn(5, 6)
    assert torch.allclose(linear_cross_entropy(x, weight, targets), reference(x, weight, targets))
    logits = x @ weight.t()
    assert torch.allclose(
        cross_entropy.cross_entropy(logits, targets), reference(x, weight, targets)
    )
