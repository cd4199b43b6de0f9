"""Zero bubble (Qi et al. 2024, arXiv 2401.10241): backward split into input (I) and weight (W)
gradients.

A forward whose backward is split runs under `SplitBackward`: the backward of a linear layer
computes the gradient of its input only, and defers the GEMM of its weight's gradient to the
schedule's W action, which fills the bubble. Whatever is no linear layer on a weight of its own
(norms, embeddings, weights that are gathered or shared first) gets its gradient in I. So do
low-rank adapters: their GEMMs are thin, 2 rank (in + out) operations a token beside the frozen
weight's 2 in out, and deferring them would hold a layer's input and output gradient until W.
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


class DeferredWeightGrad(NamedTuple):
    """Operands of a deferred weight gradient: input [..., in] and output gradient [..., out]."""

    x: Tensor
    gradient: Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None


_active_split: ContextVar[SplitBackward | None] = ContextVar("active_split", default=None)


class SplitBackward(TorchFunctionMode):
    """While active, the backward of `F.linear` on a leaf weight defers the weight's gradient.

    Args:
        deferred: Where backward appends the operands.
        unsplit: Ids of weights that are not split: the head's, whose output gradient has the width
            of the vocabulary and would have to be kept until W.
    """

    def __init__(self, deferred: list[DeferredWeightGrad], unsplit: Container[int]) -> None:
        super().__init__()
        self.deferred, self.unsplit = deferred, unsplit

    def __enter__(self) -> SplitBackward:
        super().__enter__()
        self._token = _active_split.set(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        _active_split.reset(self._token)
        super().__exit__(*exception)

    def can_defer(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether the gradients of a layer's weight and bias can be deferred."""
        return id(weight) not in self.unsplit and all(map(_is_leaf, _not_none(weight, bias)))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and torch.is_grad_enabled():
            x, weight, bias = _linear_arguments(*args, **(kwargs or {}))
            if x.requires_grad and self.can_defer(weight, bias):
                return _SplitLinear.apply(x, (weight, bias), self.deferred)
        return func(*args, **(kwargs or {}))


def deferred_list_of(
    layers: Iterable[tuple[Tensor, Tensor | None]],
) -> list[DeferredWeightGrad] | None:
    """Where the backward of layers (weight, bias) must append their deferred gradients.

    For layers that do not call `F.linear`. None if their backward is not split.
    """
    mode = _active_split.get()
    if mode is None or not torch.is_grad_enabled():
        return None
    return mode.deferred if all(mode.can_defer(*layer) for layer in layers) else None


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a checkpointed forward and of its recomputation, for `torch.utils.checkpoint`.

    The recomputation runs in backward, after the mode was left: it is entered again.
    """
    return nullcontext(), _active_split.get() or nullcontext()


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arguments of `F.linear`, however they are passed."""
    return input, weight, bias


def _not_none(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _is_leaf(weight: Tensor) -> bool:
    return weight.is_leaf and weight.requires_grad


class _SplitLinear(torch.autograd.Function):
    """y = x W^T + b, whose backward computes the gradient of x only (I).

    Weight and bias are passed in a tuple, which hides them from autograd: it would wait for their
    gradients otherwise.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parameters: tuple[nn.Parameter, nn.Parameter | None],
        deferred: list[DeferredWeightGrad],
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.parameters, ctx.deferred = parameters, deferred
        return F.linear(x, *parameters)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        ctx.deferred.append(DeferredWeightGrad(x.detach(), gradient, *ctx.parameters))
        return gradient @ ctx.parameters[0], None, None


@torch.no_grad()
def compute_deferred_weight_grads(
    deferred: list[DeferredWeightGrad],
    accumulate: Callable[[nn.Parameter, Tensor], None],
    accumulate_product: Callable[[nn.Parameter, Tensor, Tensor], None],
) -> None:
    """Run a W action: compute the deferred gradients in the order they were deferred.

    Args:
        deferred: Operands; each pair is freed before the next is multiplied.
        accumulate: Takes a bias and its gradient.
        accumulate_product: Takes a weight [out, in] and the factors of its gradient, [out, N] and
            [N, in].
    """
    deferred.reverse()
    while deferred:
        x, gradient, weight, bias = deferred.pop()
        gradient_NO = gradient.flatten(0, -2)
        accumulate_product(weight, gradient_NO.t(), x.flatten(0, -2))
        if bias is not None:
            accumulate(bias, gradient_NO.sum(0))
