"""Kernels where they are used: the head with its loss, one Llama-style layer, a whole training
step.

All are the product's own modules; what differs is what runs in their seams
(`workbench.kernels.fused_seams`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.benchmarks import kernels_liger as liger
from tests.benchmarks.kernels_timing import ROUNDS, WHOLE_ROUNDS, bytes_of, peak_bytes, seconds_of
from workbench.engine.optimizer.mixed_precision_optimizer import MixedPrecisionOptimizer
from workbench.kernels.fused_seams import replace_seams
from workbench.kernels.linear_cross_entropy import linear_cross_entropy
from workbench.models import Transformer
from workbench.models.seams import IGNORE_INDEX, at_least_fp32
from workbench.parallel.layout import Layout
from workbench.plan import schema
from workbench.plan.model.model_shape import Shape
from workbench.runtime_facts.loss_chunks import loss_chunk_tokens

KERNELS = ("eager", "compiled", "fused")
"""What a plan may say, and what these are called here."""
ALIKE = 0.02
"""Losses of the same model and tokens may differ by this share: a wrong model is not timed."""


@dataclass(frozen=True)
class Size:
    """A model, and the tokens [batch, length] that it sees."""

    shape: Shape
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        """Of a batch."""
        return self.batch * self.length


# ---- the head ------------------------------------------------------------------------------------


def plain_head(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Projection, then loss: the whole logits are there, twice in 16 bits and fp32."""
    logits = at_least_fp32(F.linear(x, weight))
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE_INDEX)


def heads(n: int, d: int, v: int) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Contestants. `compiled_chunked` is what a compiler and recomputation give without a kernel: a
    run of tokens at a time, as many as ours takes, whose logits are made again in backward.
    """
    whole = torch.compile(plain_head, dynamic=False)
    part = torch.compile(_plain_head_of_a_run, dynamic=False)
    step = loss_chunk_tokens(n, d, v)

    def chunked(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        runs = zip(x.split(step), targets.split(step))
        return torch.stack(
            [checkpoint(part, a, weight, b, use_reentrant=False) for a, b in runs]
        ).sum()

    found = {
        "eager": plain_head,
        "compiled": whole,
        "compiled_chunked": chunked,
        "fused": linear_cross_entropy,
        "liger": liger.linear_cross_entropy(),
    }
    return {name: head for name, head in found.items() if head is not None}


def _plain_head_of_a_run(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return plain_head(x, weight, targets)


def head_losses(
    device: torch.device, dtype: torch.dtype, tokens: int, width: int, vocabs: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """Seconds and peak bytes of forward and backward, for each vocabulary."""
    for vocab in vocabs:
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(
            tokens, width, device=device, dtype=dtype, generator=generator
        ).requires_grad_()
        weight = torch.randn(vocab, width, device=device, dtype=dtype, generator=generator).mul_(
            width**-0.5
        )
        weight.requires_grad_()
        targets = torch.randint(vocab, (tokens,), device=device, generator=generator)
        runs = {
            name: _both(head, x, weight, targets)
            for name, head in heads(tokens, width, vocab).items()
        }
        if device.type != "cuda":
            runs.pop("liger", None)
        _alike("linear_cross_entropy", {name: float(run()) for name, run in runs.items()})
        seconds = seconds_of(device, runs, max(3, ROUNDS[device.type] // 4))
        yield {
            "kernel": "linear_cross_entropy",
            "operator": "workbench::linear_cross_entropy_run",
            "shape": [tokens, width, vocab],
            "dtype": _name(dtype),
            "pass": "step",
            "seconds": {"liger": None} | seconds,
            "peak_bytes": {"liger": None}
            | {name: peak_bytes(device, run) for name, run in runs.items()},
        }


def _both(
    head: Callable[..., Tensor], x: Tensor, weight: Tensor, targets: Tensor
) -> Callable[[], Tensor]:
    def run() -> Tensor:
        loss: Tensor = head(x, weight, targets)
        torch.autograd.grad(loss, (x, weight))
        return loss.detach()

    return run


def _alike(what: str, losses: dict[str, float]) -> None:
    for name, value in losses.items():
        if not abs(value - losses["eager"]) <= ALIKE * abs(losses["eager"]):
            raise ArithmeticError(
                f"{what}: the loss of {name} is {value:.6g}, eager's {losses['eager']:.6g}"
            )


# ---- a layer -------------------------------------------------------------------------------------


def built(size: Size, kernels: str, device: torch.device, dtype: torch.dtype) -> Transformer:
    """The model with random weights, the same for all kernels."""
    with torch.device(device):
        model = Transformer(size.shape).to(dtype)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
    replace_seams(model, kernels, device.type)
    return model


def block(size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """One layer, forward and backward, given the branch and the stream of the one before."""
    shape = (size.batch, size.length, size.shape.hidden)
    generator = torch.Generator(device).manual_seed(0)
    tensors = [
        torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(4)
    ]
    runs = {kernels: _layer(built(size, kernels, device, dtype), tensors) for kernels in KERNELS}
    whole = built(size, "eager", device, dtype)
    whole.blocks["0"] = torch.compile(whole.blocks["0"], dynamic=False)  # type: ignore[assignment]
    runs["torch_compile"] = _layer(whole, tensors)
    _alike("block", {name: float(run()) for name, run in runs.items()})
    seconds = seconds_of(device, runs, WHOLE_ROUNDS[device.type])
    return _told(
        size, dtype, seconds, {name: peak_bytes(device, run) for name, run in runs.items()}
    )


def _layer(model: Transformer, tensors: list[Tensor]) -> Callable[[], Tensor]:
    layer = model.blocks["0"]
    x, residual, *incoming = tensors
    leaves = [x.detach().requires_grad_(), residual.detach().requires_grad_(), *layer.parameters()]

    def run() -> Tensor:
        branch, stream, _ = layer(*leaves[:2], model.positions(x))
        torch.autograd.grad((branch, stream), leaves, incoming)
        loss: Tensor = branch.detach().float().square().mean()
        return loss

    return run


# ---- a step --------------------------------------------------------------------------------------


def step(size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Forward, backward and AdamW with fp32 masters; the peak is that of states and a step
    together.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape = (size.batch, size.length + 1)
    text = torch.randint(size.shape.vocab, shape, device=device, generator=generator)
    trained = {kernels: _Trained(size, kernels, device, dtype, text) for kernels in KERNELS}
    runs: dict[str, Callable[[], Tensor]] = {name: one.step for name, one in trained.items()}
    _alike("step", {name: float(run()) for name, run in runs.items()})
    seconds = seconds_of(device, runs, WHOLE_ROUNDS[device.type])
    peaks = {name: one.own_bytes() + peak_bytes(device, one.step) for name, one in trained.items()}
    return _told(size, dtype, seconds, peaks)


class _Trained:
    """A model, its gradients, the product's optimizer."""

    def __init__(
        self, size: Size, kernels: str, device: torch.device, dtype: torch.dtype, text: Tensor
    ) -> None:
        self.model = built(size, kernels, device, dtype)
        self.tokens, self.targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        parameters = dict(self.model.named_parameters())
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self.gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        layouts = {name: Layout.unsharded(name, tuple(p.shape)) for name, p in parameters.items()}
        config = schema.Optimizer(decay="constant")
        self.optimizer = MixedPrecisionOptimizer(
            parameters, self.gradients, layouts, config, 1, kernels
        )
        self.scale = 1 / self.targets.numel()

    def step(self) -> Tensor:
        loss = self.model(self.tokens, self.targets) * self.scale
        loss.backward()
        self.optimizer.step(0)
        for gradient in self.gradients.values():
            gradient.zero_()
        mean: Tensor = loss.detach()
        return mean

    def own_bytes(self) -> int:
        states = [x for of_one in self.optimizer.state().values() for x in of_one.values()]
        return bytes_of(*self.model.parameters(), *self.gradients.values(), *states)


def _told(
    size: Size, dtype: torch.dtype, seconds: dict[str, float], peaks: dict[str, int]
) -> dict[str, Any]:
    counted = "hidden", "ffn", "layers", "heads", "kv_heads", "vocab"
    return {
        "model": {name: getattr(size.shape, name) for name in counted},
        "tokens": [size.batch, size.length],
        "dtype": _name(dtype),
        "seconds": seconds,
        "peak_bytes": peaks,
        "tokens_per_second": {name: size.tokens / one for name, one in seconds.items()},
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
