"""Cross entropy without Triton, and its refused arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.profiler import ProfilerActivity, profile

from workbench.kernels.cross_entropy import cross_entropy, gradient_op, reference, statistics_op
from workbench.models.seams import IGNORE_INDEX

N, V = 6, 33


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(N, V, generator=generator, dtype=torch.float64)
    targets = torch.randint(V, (N,), generator=generator)
    targets[1] = IGNORE_INDEX
    return logits.to(dtype), targets


def peak(run: Callable[[], object]) -> int:
    """The most bytes that torch's allocator had given out at once since `run` began."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def again(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`loss`, whose backward makes it once more: gradcheck asks for several, and it gives one."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            return loss(*inputs).detach()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
            own = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            with torch.enable_grad():
                return torch.autograd.grad(loss(*own), own, gradient)

    made: Callable[..., Tensor] = Again.apply
    return made


@pytest.mark.parametrize("kernels", ["fused", "compiled"])
def test_gradients_are_the_loss_differences(kernels: str) -> None:
    logits, targets = drawn()

    def loss(x: Tensor) -> Tensor:
        return cross_entropy(x * 1, targets, kernels=kernels)

    assert torch.autograd.gradcheck(again(loss), logits.requires_grad_())
    true = F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
    assert (loss(logits) - true).abs() < 1e-12 * true


def test_smoothing_and_z_loss() -> None:
    logits, targets = drawn()

    def loss(x: Tensor) -> Tensor:
        return cross_entropy(x * 1, targets, smoothing=0.1, z=1e-2)

    assert torch.autograd.gradcheck(again(loss), logits.requires_grad_())
    assert (loss(logits) - reference(logits, targets, 0.1, 1e-2)).abs() < 1e-11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_are_rounded_once(dtype: torch.dtype) -> None:
    """The gradient is the true one's nearest number, also of a loss that is scaled: fp16 has none
    below 6e-8.
    """
    logits, targets = drawn(dtype)
    leaf, true = logits.clone().requires_grad_(), logits.double().requires_grad_()
    (cross_entropy(leaf * 1, targets) * 2048).backward()
    (reference(true, targets) * 2048).backward()
    assert leaf.grad is not None and true.grad is not None and leaf.grad.dtype == dtype
    rounded = (
        torch.finfo(dtype).eps / 2 * true.grad.abs() + torch.finfo(dtype).smallest_normal * 2**-10
    )
    assert ((leaf.grad.double() - true.grad).abs() <= 1.01 * rounded + 1e-4).all()
    assert leaf.grad[true.grad.abs() > 1e-4].all()


def test_logits_stay_until_backward_and_are_the_gradient_then() -> None:
    logits, targets = drawn()
    leaf = logits.clone().requires_grad_()
    made = leaf * 1
    loss = cross_entropy(made, targets)
    assert torch.equal(made, logits)
    loss.backward()
    assert leaf.grad is not None and torch.equal(made, leaf.grad) and not torch.equal(made, logits)


def test_without_a_gradient_logits_are_never_touched() -> None:
    logits, targets = drawn()
    before = logits._version
    loss = cross_entropy(logits, targets)
    with torch.no_grad():
        assert cross_entropy((logits.clone().requires_grad_() * 1), targets) == loss
    assert not loss.requires_grad and logits._version == before


def test_overwritten_logits_raise() -> None:
    logits, targets = drawn()
    leaf = logits.requires_grad_()
    loss = cross_entropy(leaf * 1, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    capped = leaf.tanh()  # whose backward needs what it made
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy(capped, targets).backward()
    made = leaf * 1
    both = cross_entropy(made, targets) + cross_entropy(made, targets)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        both.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_else_as_wide_as_the_vocabulary_is_made(dtype: torch.dtype) -> None:
    targets = torch.zeros(256, dtype=torch.long)
    leaf = torch.randn(256, 4096, dtype=dtype).requires_grad_()

    def run(loss: Callable[[Tensor, Tensor], Tensor]) -> int:
        made = leaf.view_as(leaf)
        return peak(lambda: torch.autograd.grad(loss(made, targets), made))

    run(cross_entropy)  # compiles
    assert run(cross_entropy) < 0.05 * leaf.nbytes < run(reference)


def test_operators_pass_torchs_opcheck() -> None:
    logits, targets = drawn(torch.float32)
    opcheck(statistics_op, (logits, targets, 0, V, True, "fused"))
    lse, factor = logits.logsumexp(-1), torch.tensor(0.5)
    opcheck(gradient_op, (logits, targets, lse, factor, 0, V - 3, 0.1, 0.1 / V, 1e-3, "fused"))


def test_within_a_compiled_graph() -> None:
    logits, targets = drawn()
    loss = torch.compile(
        lambda x: cross_entropy(x * 1, targets), backend="aot_eager", fullgraph=True
    )
    found, true = (
        torch.autograd.grad(f(logits.requires_grad_()), logits)[0]
        for f in (loss, lambda x: reference(x, targets))
    )
    assert torch.allclose(found, true)


def test_fake_tensors() -> None:
    with FakeTensorMode():
        x = torch.empty(N, V, dtype=torch.bfloat16, requires_grad=True)
        loss = cross_entropy(x * 1, torch.zeros(N, dtype=torch.long), (3, V))
        loss.backward()
        assert loss.dtype == torch.float32 and x.grad is not None and x.grad.dtype == torch.bfloat16


LOGITS, TARGETS = torch.zeros(N, V), torch.zeros(N, dtype=torch.long)
REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "device": (
        lambda: cross_entropy(LOGITS, TARGETS.to("meta")),
        "targets is on meta, but logits on cpu",
    ),
    "dtype of targets": (
        lambda: cross_entropy(LOGITS, TARGETS.int()),
        "targets are int32; legal: int64",
    ),
    "dtype of logits": (
        lambda: cross_entropy(LOGITS.to(torch.float8_e5m2), TARGETS),
        "logits is float8_e5m2",
    ),
    "integers": (lambda: cross_entropy(LOGITS.long(), TARGETS), "logits is int64; legal: float"),
    "dimensions": (
        lambda: cross_entropy(LOGITS[None], TARGETS[None]),
        "logits is torch.float32 of 3 dimensions",
    ),
    "length": (
        lambda: cross_entropy(LOGITS, TARGETS[1:]),
        r"targets has shape \(5,\); legal: \(6,\)",
    ),
    "rows": (
        lambda: cross_entropy(LOGITS, TARGETS, (0, V + 1)),
        r"rows are \(0, 34\); legal: at most .* 33 columns",
    ),
    "smoothing": (
        lambda: cross_entropy(LOGITS, TARGETS, smoothing=1.0),
        "smoothing is 1.0, z is 0.0; legal: 0 <=",
    ),
    "vocab": (
        lambda: cross_entropy(LOGITS, TARGETS, smoothing=0.1, reduce=(torch.clone, torch.clone)),
        "vocab is None; legal",
    ),
    "leaf": (
        lambda: cross_entropy(LOGITS.clone().requires_grad_(), TARGETS),
        "logits are a leaf, .* legal: what an",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_arguments_are_refused_by_name(what: str) -> None:
    run, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        run()
