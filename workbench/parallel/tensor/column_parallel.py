"""Column-split layers that share one input: backward's collectives run behind the products of the
weights' gradients.

Megatron-LM does so too (1909.08053; with split tokens 2205.05198, where the input is gathered again
behind the products of its own gradient). Here the order of autograd's nodes does it. Of what is
ready, autograd runs first what forward made last: the products with the weights (`_Columns`), which
begin the sum of the input's gradient; then each weight's gradient (`_Weight`), one after the other;
then the wait for the sum (`_Arrival`). Another order would be as right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.parallel.async_collectives import (
    WaitFn,
    all_gather_async,
    reduce_scatter_async,
    start_collective,
)
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.pipeline.zero_bubble import Deferred, deferring
from workbench.parallel.tensor.tensor_collectives import all_gather, share

Parameters = tuple[Tensor, Tensor | None]
"""Weight [out, in] and bias [out] of a layer."""


@dataclass(eq=False)
class Passage:
    """One pass of an input through its layers: what the nodes of its backward hand to one
    another.
    """

    axis: MeshAxis
    sequence: bool
    layers: Sequence[Parameters]
    late: list[Deferred] | None
    """Where a split backward leaves what the weights' gradients need."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> the gradient [N, out] of what it made, while its weight's is still to be made."""
    whole: Tensor | None = None
    """What the layers multiplied, [N, in]."""
    gathered: WaitFn | None = None
    summed: WaitFn | None = None

    def begin_gather(self, x_BTD: Tensor) -> None:
        """Begin to make whole what the layers multiplied; kept for later, it must not keep the
        graph that made it.
        """
        self.whole = x_BTD.detach().flatten(0, -2)
        if self.sequence and self.gradients:
            part_ND, self.whole = (
                self.whole,
                self.whole.new_empty(len(self.whole) * self.axis.size, x_BTD.shape[-1]),
            )
            self.gathered = all_gather_async(self.whole, part_ND, self.axis)

    def begin_sum(self, gradient_ND: Tensor, shape: torch.Size) -> Tensor:
        """Begin to sum the gradient of what came in; it is right, of `shape`, once `summed` has
        been called.
        """
        if not self.sequence:
            self.summed = start_collective(
                partial(dist.all_reduce, group=self.axis.group), gradient_ND
            )
            return gradient_ND.view(shape)
        part_BTD = gradient_ND.new_empty(shape)
        self.summed = reduce_scatter_async(part_BTD, gradient_ND, self.axis)
        return part_BTD

    def weight_gradient(self, layer: int) -> Tensor | None:
        """[out, in], or None where it is left for later; the last one lets go of everything."""
        gradient_NO, whole_ND = self.gradients.pop(layer), self.whole
        assert whole_ND is not None
        self.whole = whole_ND if self.gradients else None
        if self.late is not None:
            weight, bias = self.layers[layer]
            self.late.append(
                Deferred(
                    whole_ND, gradient_NO, cast("nn.Parameter", weight), cast("nn.Parameter", bias)
                )
            )
            return None
        if self.gathered is not None:
            self.gathered()
            self.gathered = None
        return gradient_NO.t() @ whole_ND


def columns(
    x_BTD: Tensor, layers: Sequence[Parameters], axis: MeshAxis, sequence: bool
) -> tuple[Tensor, ...]:
    """y_i = x W_i^T + b_i of layers split by outputs over `axis`, each [B, T, out / ranks].

    `x_BTD` is equal on all ranks, and its gradient is summed; with `sequence` it is a run of the
    tokens, [B, T / ranks, D], which are gathered, and the sum of their gradient is scattered.
    """
    passage = Passage(axis, sequence, layers, None if sequence else deferring(layers))
    x_BTD = _Arrival.apply(x_BTD, passage)
    weights = [_Weight.apply(weight, passage, i) for i, (weight, _) in enumerate(layers)]
    ys: tuple[Tensor, ...] = _Columns.apply(x_BTD, passage, *weights, *(bias for _, bias in layers))
    return ys


class _Arrival(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, passage: Passage) -> Tensor:
        ctx.passage = passage
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.passage.summed()
        ctx.passage.summed = None
        return gradient, None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, passage: Passage, layer: int) -> Tensor:
        ctx.passage, ctx.layer = passage, layer
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, nothing: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.passage.weight_gradient(ctx.layer), None, None


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, passage: Passage, *parameters: Any) -> tuple[Tensor, ...]:
        number = len(passage.layers)
        weights, biases = parameters[:number], parameters[number:]
        ctx.save_for_backward(x_BTD, *weights)
        ctx.passage = passage
        whole_BTD = all_gather(x_BTD, passage.axis) if passage.sequence else x_BTD
        return tuple(F.linear(whole_BTD, weight, bias) for weight, bias in zip(weights, biases))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        passage: Passage = ctx.passage
        x_BTD, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        flat = [gradient.flatten(0, -2) for gradient in gradients]
        passage.gradients = {i: gradient_NO for i, gradient_NO in enumerate(flat) if needed[i]}
        passage.begin_gather(x_BTD)
        input_gradient_ND = flat[0] @ weights[0]
        for gradient_NO, weight in zip(flat[1:], weights[1:]):
            input_gradient_ND.addmm_(gradient_NO, weight)
        # Autograd wants a gradient of a weight's shape to go on to its node, which makes the true
        # one.
        promised = [x_BTD.new_empty(()).expand(weight.shape) for weight in weights]
        biased = needed[len(weights) :] if passage.late is None else ()
        biases = [gradient_NO.sum(0) if need else None for gradient_NO, need in zip(flat, biased)]
        missing = [None] * (len(weights) - len(biases))
        return passage.begin_sum(input_gradient_ND, x_BTD.shape), None, *promised, *biases, *missing


class ColumnLinear(nn.Module):
    """A column-split layer among siblings that share their input: whoever holds them makes its
    output.

    Weight [room for out / pieces, in]; `piece` is this rank's, of fewer `pieces` than ranks where
    several need the same key-value head.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        axis: MeshAxis,
        piece: int,
        pieces: int,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.axis = weight, bias, axis
        self.piece, self.pieces = piece, pieces
        self.made: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, out / pieces], equal on the ranks that share the piece: what was made of the
        siblings' input.
        """
        y, self.made = self.made, None
        assert y is not None
        return y

    def parameters_now(self) -> Parameters:
        """Weight and bias, whose gradients are summed over the ranks that share the piece."""
        return self._own(self.weight), None if self.bias is None else self._own(self.bias)

    def _own(self, parameter: Tensor) -> Tensor:
        return (
            parameter
            if self.pieces == self.axis.size
            else share(parameter, self.axis, self.piece, self.pieces)
        )


class Siblings:
    """The column-split layers of one module, which share its first argument."""

    def __init__(self, parent: nn.Module, axis: MeshAxis, sequence: bool) -> None:
        self.axis, self.sequence = axis, sequence
        self.layers: list[ColumnLinear] = []
        parent.register_forward_pre_hook(self._make)

    def _make(self, parent: nn.Module, inputs: tuple[Any, ...]) -> None:
        parameters = [layer.parameters_now() for layer in self.layers]
        for layer, y in zip(self.layers, columns(inputs[0], parameters, self.axis, self.sequence)):
            layer.made = y
