"""Projection and loss in chunks without Triton: values, memory, and refused arguments."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from tests.kernels.test_cross_entropy import again, peak
from workbench.kernels.cross_entropy import gradient_scale
from workbench.kernels.linear_cross_entropy import chunk_op, linear_cross_entropy, reference
from workbench.models.seams import IGNORE_INDEX
from workbench.parallel.pipeline.zero_bubble import SplitBackward
from workbench.runtime_facts import loss_chunks
from workbench.runtime_facts.loss_chunks import loss_chunk_columns, loss_chunk_tokens

N, D, V = 70, 8, 33


def drawn(
    dtype: torch.dtype = torch.float64, tokens: int = N, vocab: int = V
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, D, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    targets[1] = IGNORE_INDEX
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def gradients(
    loss: Any, x: Tensor, weight: Tensor, targets: Tensor, incoming: float = 1.0
) -> list[Tensor]:
    return list(torch.autograd.grad(loss(x, weight, targets) * incoming, (x, weight)))


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_chunks, "LOSS_MIN_CHUNK_TOKENS", 64)


@pytest.mark.parametrize("kernels", ["fused", "compiled"])
def test_gradients_are_the_loss_differences(short_runs: None, kernels: str) -> None:
    x, weight, targets = drawn(tokens=66, vocab=11)
    assert loss_chunk_tokens(66, D, 11) < 66

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets, kernels=kernels)

    assert torch.autograd.gradcheck(again(loss), (x, weight), fast_mode=True)
    true = F.cross_entropy(F.linear(x, weight), targets, reduction="sum", ignore_index=-100)
    assert (loss(x, weight) - true).abs() < 1e-12 * true


def test_runs_are_few_even_and_as_large_as_the_input() -> None:
    assert loss_chunk_tokens(8192, 4096, 128256) == 1024
    assert loss_chunk_tokens(65536, 4096, 128256) == 8192, "at most eight runs"
    assert loss_chunk_tokens(16384, 8192, 32000) == 4096, "logits as large as the input"
    assert loss_chunk_tokens(1025, 64, 50257) == 576, "two runs, not one and a rest"
    assert loss_chunk_tokens(100, 4096, 128256) == 100 and loss_chunk_tokens(0, 4096, 128256) == 0
    for n in range(1, 20000, 371):
        for d, v in ((64, 50257), (4096, 32000), (8192, 1)):
            step = loss_chunk_tokens(n, d, v)
            assert (
                0 < step <= n
                and -(-n // step) <= loss_chunks.LOSS_MAX_CHUNKS
                and (step % 64 == 0 or step == n)
            )
            assert step * v <= max(1024 * v, n * d, n * v / 8) + 64 * v


@pytest.mark.parametrize(
    "needs", [(True, True), (True, False), (False, True), (False, False)], ids=str
)
def test_only_requested_gradients_are_computed(short_runs: None, needs: tuple[bool, bool]) -> None:
    x, weight, targets = drawn()
    true = gradients(reference, x, weight, targets)
    own = [t.detach().requires_grad_(need) for t, need in zip((x, weight), needs)]
    loss = linear_cross_entropy(*own, targets)
    assert loss.requires_grad == any(needs)
    if any(needs):
        loss.backward()
    for t, need, other in zip(own, needs, true):
        assert (t.grad is None) == (not need)
        assert t.grad is None or torch.allclose(t.grad, other)


def test_evaluation_makes_no_gradient() -> None:
    x, weight, targets = drawn(torch.float32, 1024, 4096)
    with torch.no_grad():
        linear_cross_entropy(x, weight, targets)
        most = peak(lambda: linear_cross_entropy(x, weight, targets))
    room = 1024 * loss_chunk_columns(4096) * 4
    assert room <= most < room + 40 * 1024


def test_loud_where_backward_runs_twice() -> None:
    x, weight, targets = drawn()
    loss = linear_cross_entropy(x, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_memory_is_less_than_a_quarter() -> None:
    x, weight, targets = drawn(torch.bfloat16, 2048, 32768)
    gradients(linear_cross_entropy, x, weight, targets)  # compiles
    mine, plain = (
        peak(partial(gradients, f, x, weight, targets)) for f in (linear_cross_entropy, reference)
    )
    room = loss_chunk_tokens(2048, D, 32768) * 32768 * 2
    assert mine <= 1.1 * (room + x.nbytes + weight.nbytes) and mine < plain / 4


def test_rehearsed_memory_is_that_of_a_run(short_runs: None) -> None:
    """All that is as large as a run's logits is made outside the operator."""
    x, weight, targets = drawn(torch.float32)
    room = torch.empty(64, loss_chunk_columns(V))
    made = torch.empty_like(x), torch.empty_like(weight)
    x, weight = x.detach(), weight.detach()

    def run() -> Tensor:
        loss: Tensor = chunk_op(
            x[:64], weight, targets[:64], room, made[0][:64], made[1], True, 0.0, 0.0, "fused"
        )
        return loss

    run()
    assert peak(run) < 64 * V * 4 / 2


def test_bf16_is_rounded_little_more_than_at_once() -> None:
    """Eight runs are summed in bf16 where plain operators round once."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8192, 64, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(512, 64, generator=generator) / 4).bfloat16().requires_grad_()
    targets = torch.randint(512, (8192,), generator=generator)
    true = gradients(
        reference,
        x.detach().double().requires_grad_(),
        weight.detach().double().requires_grad_(),
        targets,
    )
    mine, plain = (gradients(f, x, weight, targets) for f in (linear_cross_entropy, reference))
    for a, b, c in zip(mine, plain, true, strict=True):
        assert (a.double() - c).norm() <= 2 * (b.double() - c).norm()


def test_fp16_loses_no_small_gradient() -> None:
    """Of tokens that are nearly certain under a loss scale; unscaled, they are next to fp16's least
    number, 6e-8.
    """
    x = torch.full((N, D), 0.5, dtype=torch.float16).requires_grad_()
    weight = torch.linspace(0, 1, V)[:, None].repeat(1, D).half()
    weight[0] = 4.75
    targets = torch.zeros(N, dtype=torch.long)
    own = x.detach().double().requires_grad_(), weight.double().requires_grad_()
    true = gradients(reference, *own, targets, 2.0**14)[1][1:]
    found = gradients(linear_cross_entropy, x, weight.requires_grad_(), targets, 2.0**14)[1][1:]
    assert (true / (N * 0.5 * 2**14)).max() < 2e-6  # as a gradient of a logit
    assert ((found - true).abs() <= 2e-3 * true).all() and true.all()


@pytest.mark.parametrize("z", [0.0, 1e-2])
def test_fp16_holds_sums_beyond_its_range(short_runs: None, z: float) -> None:
    """Of gradients that are multiplied before what comes in divides them."""
    x, weight, _ = drawn(torch.float16)
    targets = torch.zeros(N, dtype=torch.long)
    own = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    true = gradients(partial(reference, z=z), *own, targets, 2.0**-3)
    found = gradients(partial(linear_cross_entropy, z=z), x, weight, targets, 2.0**-3)
    assert (
        true[1].abs().max() * 2**3 * gradient_scale(torch.float16, z)
        > torch.finfo(torch.float16).max
        or z
    )
    for mine, other in zip(found, true, strict=True):
        assert (mine - other).abs().max() <= 2e-3 * other.abs().max()


def test_a_split_backward_leaves_it_alone() -> None:
    """Its products are no linear layers: none is put aside, and the weight's gradient comes with
    the input's.
    """
    x, weight, targets = drawn()
    deferred: list[Any] = []
    with SplitBackward(deferred, ()):
        loss = linear_cross_entropy(x * 1, weight, targets)
    loss.backward()
    assert not deferred and weight.grad is not None and x.grad is not None


def test_operator_passes_torchs_opcheck() -> None:
    x, weight, targets = (t.detach() for t in drawn(torch.float32))
    room, made = (
        torch.empty(N, loss_chunk_columns(V)),
        (torch.empty_like(x), torch.empty_like(weight)),
    )
    opcheck(chunk_op, (x, weight, targets, room, *made, True, 0.1, 1e-3, "fused"))
    opcheck(chunk_op, (x, weight, targets, room, None, None, True, 0.0, 0.0, "fused"))


def test_within_a_compiled_graph(short_runs: None) -> None:
    x, weight, targets = drawn()
    loss = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    pairs = zip(
        gradients(loss, x, weight, targets), gradients(reference, x, weight, targets), strict=True
    )
    assert all(torch.allclose(mine, true) for mine, true in pairs)


def test_fake_tensors(short_runs: None) -> None:
    with FakeTensorMode():
        x, weight = (torch.empty(n, D, dtype=torch.float16, requires_grad=True) for n in (N, V))
        loss = linear_cross_entropy(x, weight, torch.zeros(N, dtype=torch.long))
        loss.backward()
        assert loss.dtype == torch.float32 and x.grad is not None and weight.grad is not None
        assert x.grad.dtype == weight.grad.dtype == torch.float16


X, WEIGHT, TARGETS = torch.zeros(N, D), torch.zeros(V, D), torch.zeros(N, dtype=torch.long)
REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "device": (
        lambda: linear_cross_entropy(X, WEIGHT.to("meta"), TARGETS),
        "weight is on meta, but x on cpu",
    ),
    "width": (
        lambda: linear_cross_entropy(X, WEIGHT[:, 1:], TARGETS),
        r"shape \(33, 7\); legal: .*\(vocabulary, 8\)",
    ),
    "dtype": (
        lambda: linear_cross_entropy(X, WEIGHT.half(), TARGETS),
        "weight is torch.float16 of",
    ),
    "vocabulary": (lambda: linear_cross_entropy(X, WEIGHT[:0], TARGETS), r"shape \(0, 8\); legal"),
    "batch": (
        lambda: linear_cross_entropy(X[None], WEIGHT, TARGETS),
        "x is torch.float32 of 3 dimensions; legal",
    ),
    "targets": (
        lambda: linear_cross_entropy(X, WEIGHT, TARGETS[1:]),
        r"targets has shape \(69,\); legal: \(70,\)",
    ),
    "z": (
        lambda: linear_cross_entropy(X, WEIGHT, TARGETS, z=-1.0),
        "smoothing is 0.0, z is -1.0; legal: 0 <=",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_arguments_are_refused_by_name(what: str) -> None:
    run, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        run()
