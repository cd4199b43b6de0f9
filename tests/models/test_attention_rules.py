"""Attention with a window, ALiBi and a soft-cap equals its definition in double precision, written
out over all pairs of tokens.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_oracle import built, text
from workbench.kernels.fused_seams import replace_seams
from workbench.models.attention import blockwise_attention
from workbench.models.attention.blockwise_attention import Chunk, visible_tiles
from workbench.models.attention.score_rule import ScoreRule, alibi_slopes
from workbench.models.seams import Attend, Positions
from workbench.plan.model.model_shape import Shape

HEADS, TIME, HEAD_DIM = 6, 23, 8
SLOPES = alibi_slopes(HEADS)
RULES = {
    "window": ScoreRule(window=7),
    "window of one": ScoreRule(window=1),
    "alibi": ScoreRule(slopes=SLOPES),
    "soft-cap": ScoreRule(softcap=1.5, scale=0.7),
    "all": ScoreRule(0.4, 2.0, SLOPES, 9),
    "scale": ScoreRule(scale=0.7),
}
NOWHERE = Positions(torch.empty(0), torch.empty(0), torch.empty(0))


def defined(rule: ScoreRule, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, T, heads, head_dim] by a loop over pairs of tokens."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihk,bjhk->bhij", q, k)
    scores = scores * (q.shape[-1] ** -0.5 if rule.scale is None else rule.scale)
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    bias = torch.zeros(scores.shape[1:], dtype=q.dtype)
    for i in range(q.shape[1]):
        for j in range(q.shape[1]):
            if j > i or (rule.window is not None and j <= i - rule.window):
                bias[:, i, j] = -torch.inf
            elif rule.slopes is not None:
                bias[:, i, j] = torch.tensor(rule.slopes, dtype=q.dtype) * (j - i)
    return torch.einsum("bhij,bjhk->bihk", (scores + bias).softmax(-1), v)


def results(attend: Any, *written: Tensor) -> list[Tensor]:
    """Output and gradients."""
    q, k, v = (x.clone().requires_grad_() for x in written)
    out = attend(q, k, v)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kernel", ["flash", "blockwise", "math"])
def test_every_kernel_equals_the_definition(
    kernel: str, name: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = RULES[name]
    if kernel == "flash" and rule.softcap is not None:
        pytest.skip("rules refuse flash with a soft-cap")
    monkeypatch.setattr(blockwise_attention, "TILE_QUERIES", 5)
    generator = torch.Generator().manual_seed(1)
    sizes = [(2, TIME, heads, HEAD_DIM) for heads in (HEADS, groups, groups)]
    inputs = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    attend = Attend(rule)
    attend.kernel = kernel
    found = results(lambda q, k, v: attend(q, k, v, NOWHERE), *inputs)
    exact = results(lambda *x: defined(rule, *x), *inputs)
    largest = max(float(x.abs().max()) for x in exact)
    for got, wanted in zip(found, exact, strict=True):
        assert float((got - wanted).abs().max()) <= 1e-13 * largest


@pytest.mark.parametrize("kernel", ["flash", "blockwise", "math"])
def test_sixteen_bits_are_attended_to_in_fp32(kernel: str) -> None:
    rule = ScoreRule(slopes=SLOPES, window=9)
    inputs = [torch.randn(2, TIME, HEADS, HEAD_DIM).bfloat16() for _ in range(3)]
    attend = Attend(rule)
    attend.kernel = kernel
    out, exact = attend(*inputs, NOWHERE), defined(rule, *(x.double() for x in inputs))
    assert out.dtype == torch.bfloat16
    assert float((out.double() - exact).abs().max()) < 4 * torch.finfo(torch.bfloat16).eps


def test_tiles_are_all_pairs_that_see_each_other_and_no_more() -> None:
    chunks = [Chunk(0, 10, 7), Chunk(7, 40, 7)]
    keys = [Chunk(0, 0, 20), Chunk(20, 30, 15)]
    for window in (None, 1, 6, 12, 25):
        seen: list[tuple[int, int]] = []
        for tile in visible_tiles(chunks, keys, window):
            assert all(
                any(j <= i and (window is None or j > i - window) for j in tile.keys)
                for i in tile.queries
            )
            seen += [(i, j) for i in tile.queries for j in tile.keys]
        wanted = {
            (i, j)
            for chunk in chunks
            for i in chunk.positions
            for other in keys
            for j in other.positions
            if j <= i and (window is None or j > i - window)
        }
        assert wanted <= set(seen) and len(seen) == len(set(seen))


def test_slopes_of_bloom() -> None:
    """Of 112 heads, BLOOM-176B's, transformers' `build_alibi_tensor` gives these first and last."""
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(6) == (0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125)
    assert len(alibi_slopes(112)) == 112 and alibi_slopes(112)[64] == 2**-0.0625


def test_of_so_many_layers_the_last_has_no_window() -> None:
    shape = Shape.model_validate(
        {"layers": 5, "hidden": 8, "heads": 1, "ffn": 8, "vocab": 9}
        | {"window": 3, "full_attention_every": 2}
    )
    assert [ScoreRule.of_layer(shape, i).window for i in range(5)] == [3, None, 3, None, 3]


@pytest.mark.parametrize("kernels", ["eager", "compiled", "fused"])
def test_the_loss_of_soft_capped_logits(kernels: str) -> None:
    written = {"layers": 1, "hidden": 24, "heads": 4, "ffn": 40, "vocab": 257}
    cap, (_, targets) = 0.8, text()
    plain, capped = built(written), built({**written, "logit_softcap": cap})
    replace_seams(capped, kernels, "cpu")
    assert capped.head is not None and plain.head is not None
    x, y = (torch.randn(2, 11, 24, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y.data.copy_(x.data)
    found = capped.head(x, targets)
    logits = cap * torch.tanh(y @ plain.head.weight.T / cap)
    wanted = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    found.backward(), wanted.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
    pairs = (x.grad, y.grad), (capped.head.weight.grad, plain.head.weight.grad)
    for got, exact in pairs:
        assert got is not None and exact is not None
        assert float((got - exact).abs().max()) <= 1e-12 * float(exact.abs().max())
