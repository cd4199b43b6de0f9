"""Backward in two halves: input gradients now, weight gradients later (zero bubble, Qi et al. 2024,
arXiv 2401.10241).

A forward whose backward is split runs under `SplitLinears`: what a linear layer would need for its
weight's gradient is put aside by its backward and multiplied later. Whatever is no linear layer on
a weight of its own (norms, embeddings, weights that are first gathered or shared) gets its gradient
with the input gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Deferred(NamedTuple):
    """One product that a weight's gradient still needs: input [..., in] and output gradient [...,
    out].
    """

    x: Tensor
    gradient: Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None


_entered: ContextVar[SplitLinears | None] = ContextVar("entered", default=None)


class SplitLinears(TorchFunctionMode):
    """While entered, `F.linear` on a leaf weight puts its weight's gradient aside in `deferred`
    when it runs backward.

    `whole` holds the ids of weights that are not split: the head's, whose output gradient is of
    vocabulary width.
    """

    def __init__(self, deferred: list[Deferred], whole: Container[int]) -> None:
        super().__init__()
        self.deferred, self.whole = deferred, whole

    def __enter__(self) -> SplitLinears:
        super().__enter__()
        self._before = _entered.set(self)
        return self

    def __exit__(self, *why: Any) -> None:
        _entered.reset(self._before)
        super().__exit__(*why)

    def splits(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether a layer's weight gradient can wait."""
        return id(weight) not in self.whole and all(map(_is_leaf, _present(weight, bias)))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and torch.is_grad_enabled():
            x, weight, bias = _operands(*args, **(kwargs or {}))
            if x.requires_grad and self.splits(weight, bias):
                return _SplitLinear.apply(x, (weight, bias), self.deferred)
        return func(*args, **(kwargs or {}))


def deferring(layers: Iterable[tuple[Tensor, Tensor | None]]) -> list[Deferred] | None:
    """Where the backward of layers (weight, bias) that intercept no `F.linear` leaves their
    weights' gradients, if it is to be split.
    """
    mode = _entered.get()
    if (
        mode is None
        or not torch.is_grad_enabled()
        or not all(mode.splits(*layer) for layer in layers)
    ):
        return None
    return mode.deferred


def for_recomputation() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """(nothing, what is entered now): contexts of a checkpointed forward and of its repetition in
    backward.
    """
    return nullcontext(), _entered.get() or nullcontext()


def _operands(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `F.linear` names them."""
    return input, weight, bias


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _is_leaf(weight: Tensor) -> bool:
    return weight.is_leaf and weight.requires_grad


class _SplitLinear(torch.autograd.Function):
    """y = x W^T + b, whose backward gives the gradient of x alone; weight and bias are hidden from
    autograd.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parameters: tuple[nn.Parameter, nn.Parameter | None],
        deferred: list[Deferred],
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.parameters, ctx.deferred = parameters, deferred
        return F.linear(x, *parameters)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        ctx.deferred.append(Deferred(x.detach(), gradient, *ctx.parameters))
        return gradient @ ctx.parameters[0], None, None


@torch.no_grad()
def finish(deferred: list[Deferred], add: Callable[[nn.Parameter, Tensor], None]) -> None:
    """Multiply what was put aside and `add` each weight's gradient; what is done is let go at
    once.
    """
    deferred.reverse()
    while deferred:
        x, gradient, weight, bias = deferred.pop()
        gradient_NO = gradient.flatten(0, -2)
        add(weight, gradient_NO.t() @ x.flatten(0, -2))
        if bias is not None:
            add(bias, gradient_NO.sum(0))
