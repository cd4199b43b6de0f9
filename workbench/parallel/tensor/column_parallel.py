"""Column-parallel linear layers: sharded by outputs, backward's collectives overlapped
(1909.08053).

The layers of a module that share one input (q, k and v; gate and up) run as one group. In backward
the all-reduce of the input's gradient overlaps with the GEMMs of the weights' gradients, as in
Megatron-LM; with sequence parallelism (2205.05198) it is a reduce-scatter, and the input is
all-gathered again behind the GEMM of its own gradient, instead of being kept.

The overlap comes from the order of autograd's nodes. Of those that are ready autograd runs first
what forward made last: `_ColumnParallelGemm`, which computes the input's gradient and starts its
reduction; then each `_WeightGradient`; then `_WaitInputGradient`. Any other order would give the
same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.adapters.four_bit_tensor import FourBitTensor
from workbench.adapters.lora_linear import LoraAdapter
from workbench.parallel.async_collectives import (
    WaitFn,
    all_gather_async,
    reduce_scatter_async,
    start_collective,
)
from workbench.parallel.float8.float8_linear import Float8Gemms, Float8Layer, Role, compute_scales
from workbench.parallel.lora.adapted_columns import AdaptedLayer, adapted_column_parallel_linear
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.pipeline.zero_bubble import DeferredWeightGrad, deferred_list_of
from workbench.parallel.tensor.tensor_collectives import all_gather, share_weight

INPUT: Role = "input"
WEIGHT: Role = "weight"
GRADIENT: Role = "gradient"
Parameters = tuple[Tensor, Tensor | None]
"""Weight [out, in] and bias [out] of a layer."""


@dataclass(eq=False)
class ColumnParallelBackward:
    """State that the backward nodes of one group, for one input, share."""

    axis: MeshAxis
    sequence: bool
    layers: Sequence[Parameters]
    deferred: list[DeferredWeightGrad] | None
    """Where weight gradients are deferred to, if backward is split (zero bubble)."""
    output_gradients: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> gradient of its output [N, out], until its weight's gradient is computed."""
    input: Tensor | None = None
    """Input of the layers, of all tokens [N, in]."""
    wait_gather: WaitFn | None = None
    wait_reduce: WaitFn | None = None
    float8: Sequence[Float8Gemms] = ()
    """The layers' GEMMs, where they are fp8; the first finds the scale of their input."""

    def start_gather(self, x_BTD: Tensor) -> None:
        """Start the all-gather of the layers' input, if weight gradients need it.

        Detached: a deferred weight gradient that holds the input must not hold its graph.
        """
        self.input = x_BTD.detach().flatten(0, -2)
        if self.sequence and self.output_gradients:
            local_ND, width = self.input, x_BTD.shape[-1]
            self.input = local_ND.new_empty(len(local_ND) * self.axis.size, width)
            self.wait_gather = all_gather_async(self.input, local_ND, self.axis)

    def start_reduce(self, gradient_ND: Tensor, shape: torch.Size) -> Tensor:
        """Start the all-reduce (or reduce-scatter) of the input's gradient.

        The result, of `shape`, is valid once `wait_reduce` has been called.
        """
        if not self.sequence:
            all_reduce = partial(dist.all_reduce, group=self.axis.group)
            self.wait_reduce = start_collective(all_reduce, gradient_ND)
            return gradient_ND.view(shape)
        local_BTD = gradient_ND.new_empty(shape)
        self.wait_reduce = reduce_scatter_async(local_BTD, gradient_ND, self.axis)
        return local_BTD

    def weight_gradient(self, layer: int) -> Tensor | None:
        """Gradient [out, in] of a layer's weight, or None if it is deferred to W.

        The last layer's frees the input.
        """
        gradient_NO, input_ND = self.output_gradients.pop(layer), self.input
        assert input_ND is not None
        self.input = input_ND if self.output_gradients else None
        if self.deferred is not None:
            weight, bias = self.layers[layer]
            self.deferred.append(
                DeferredWeightGrad(
                    input_ND, gradient_NO, cast("nn.Parameter", weight), cast("nn.Parameter", bias)
                )
            )
            return None
        if self.wait_gather is not None:
            self.wait_gather()
            self.wait_gather = None
        if self.float8:
            return self.float8[layer].weight_gradient(gradient_NO, input_ND)
        return gradient_NO.t() @ input_ND

    def outputs(
        self, x_BTD: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        """[B, T, out] of each layer."""
        if not self.float8:
            return tuple(F.linear(x_BTD, weight, bias) for weight, bias in zip(weights, biases))
        first, ys = self.float8[0], list[Tensor]()
        each = [(gemms, WEIGHT, weight) for gemms, weight in zip(self.float8, weights)]
        compute_scales([(first, INPUT, x_BTD), *each])
        for gemms, weight, bias in zip(self.float8, weights, biases):
            gemms.scales[INPUT] = first.scales[INPUT]
            y = gemms.output(x_BTD, weight)
            ys.append(y if bias is None else y + bias)
        return tuple(ys)

    def input_gradient(self, gradients_NO: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """Gradient [N, in] of the input, summed over the layers."""
        if self.float8:
            compute_scales([(gemms, GRADIENT, g) for gemms, g in zip(self.float8, gradients_NO)])
            parts = zip(self.float8, gradients_NO, weights)
            products = [gemms.input_gradient(g, weight) for gemms, g, weight in parts]
            for product in products[1:]:
                products[0] += product
            return products[0]
        input_gradient_ND = gradients_NO[0] @ weights[0]
        for gradient_NO, weight in zip(gradients_NO[1:], weights[1:]):
            input_gradient_ND.addmm_(gradient_NO, weight)
        return input_gradient_ND


def column_parallel_linear(
    x_BTD: Tensor,
    layers: Sequence[Parameters],
    axis: MeshAxis,
    sequence: bool,
    float8: Sequence[Float8Layer] = (),
) -> tuple[Tensor, ...]:
    """y_i = x W_i^T + b_i for a group of layers that are sharded by outputs over `axis`.

    Args:
        x_BTD: [B, T, D], equal on all ranks; its gradient is all-reduced. With sequence parallelism
            this rank's tokens [B, T / ranks, D], which are all-gathered; the gradient is
            reduce-scattered.
        layers: Weight [out / ranks, D] and bias [out / ranks] or None of each layer.
        sequence: Whether the input is sharded by tokens.
        float8: Of each layer, where GEMMs are fp8; collectives are of the dtypes given all the
            same.

    Returns:
        [B, T, out / ranks] of each layer.
    """
    # With sequence parallelism weight gradients are not deferred: the gathered input would have to
    # be kept until W.
    deferred = None if sequence else deferred_list_of(layers)
    state = ColumnParallelBackward(axis, sequence, layers, deferred)
    if float8:
        state.float8 = [Float8Gemms(layer) for layer in float8]
    x_BTD = _WaitInputGradient.apply(x_BTD, state)
    weights = [_WeightGradient.apply(weight, state, i) for i, (weight, _) in enumerate(layers)]
    biases = (bias for _, bias in layers)
    ys: tuple[Tensor, ...] = _ColumnParallelGemm.apply(x_BTD, state, *weights, *biases)
    return ys


class _WaitInputGradient(torch.autograd.Function):
    """Identity, whose backward waits for the reduction: the last node of the group to run."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, state: ColumnParallelBackward) -> Tensor:
        ctx.state = state
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.state.wait_reduce()
        ctx.state.wait_reduce = None
        return gradient, None


class _WeightGradient(torch.autograd.Function):
    """Identity on a weight, whose backward computes its gradient while the reduction is in
    flight.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, state: ColumnParallelBackward, layer: int) -> Tensor:
        ctx.state, ctx.layer = state, layer
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, placeholder: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.state.weight_gradient(ctx.layer), None, None


class _ColumnParallelGemm(torch.autograd.Function):
    """The GEMMs; backward computes the input's gradient and starts both collectives."""

    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, state: ColumnParallelBackward, *parameters: Any
    ) -> tuple[Tensor, ...]:
        num_layers = len(state.layers)
        weights, biases = parameters[:num_layers], parameters[num_layers:]
        # Gradients of weights alone need the input: frozen ones have none.
        trained = any(ctx.needs_input_grad[2 : 2 + num_layers])
        ctx.save_for_backward(x_BTD if trained else None, *weights)
        ctx.input_shape = x_BTD.shape
        ctx.state = state
        full_BTD = all_gather(x_BTD, state.axis) if state.sequence else x_BTD
        return state.outputs(full_BTD, weights, biases)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        state: ColumnParallelBackward = ctx.state
        x_BTD, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        flat = [gradient.flatten(0, -2) for gradient in gradients]
        state.output_gradients = {i: gradient_NO for i, gradient_NO in enumerate(flat) if needed[i]}
        if x_BTD is not None:
            state.start_gather(x_BTD)
        input_gradient_ND = state.input_gradient(flat, weights)
        # Autograd checks the shape of what goes on to a weight's node, which computes the true
        # gradient; these placeholders hold a single element each.
        placeholders = [weight.new_empty(()).expand(weight.shape) for weight in weights]
        biased = needed[len(weights) :] if state.deferred is None else ()
        biases = [gradient_NO.sum(0) if need else None for gradient_NO, need in zip(flat, biased)]
        missing = [None] * (len(weights) - len(biases))
        input_gradient = state.start_reduce(input_gradient_ND, ctx.input_shape)
        return input_gradient, None, *placeholders, *biases, *missing


class ColumnParallelLinear(nn.Module):
    """A column-parallel layer of a `ColumnParallelGroup`, which computes its output.

    Args:
        weight: [out / shards, in], padding included.
        bias: [out / shards] or None.
        axis: The tensor axis.
        shard: Which of `num_shards` this rank's is; several ranks have the same where they need
            the same key-value head (GQA).
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        axis: MeshAxis,
        shard: int,
        num_shards: int,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.axis = weight, bias, axis
        self.shard, self.num_shards = shard, num_shards
        self.output: Tensor | None = None
        self.float8: Float8Layer | None = None
        self.lora: LoraAdapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The output [B, T, out / shards] that the group has computed from the same input."""
        y, self.output = self.output, None
        assert y is not None
        return y

    def gemm_parameters(self) -> Parameters:
        """Weight and bias, with gradients summed over the ranks that have the same shard."""
        return self._shared(self.weight), None if self.bias is None else self._shared(self.bias)

    def adapted(self) -> AdaptedLayer:
        """The frozen weight and bias, and the adapter if there is one."""
        b = None if self.lora is None else self._shared(self.lora.b)
        return self.weight, self.bias, self.lora, b

    def _shared(self, parameter: Tensor) -> Tensor:
        if self.num_shards == self.axis.size:
            return parameter
        return share_weight(parameter, self.axis, self.shard, self.num_shards)


class UngroupedColumnParallelLinear(nn.Module):
    """A column-parallel layer without bias whose input no other layer reads.

    Args:
        weight: [out / ranks, in], padding included.
        axis: The tensor axis.
        sequence: Whether the input is sharded by tokens.
    """

    def __init__(self, weight: nn.Parameter, axis: MeshAxis, sequence: bool) -> None:
        super().__init__()
        self.weight, self.axis, self.sequence = weight, axis, sequence
        self.lora: LoraAdapter | None = None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D], or with sequence parallelism [B, T / ranks, D], to [B, T, out / ranks]."""
        if self.lora is not None or isinstance(self.weight, FourBitTensor):
            b = None if self.lora is None else self.lora.b
            adapted = [(self.weight, None, self.lora, b)]
            (y_BTO,) = adapted_column_parallel_linear(x_BTD, adapted, self.axis, self.sequence)
            return y_BTO
        layers = [(self.weight, None)]
        (y_BTO,) = column_parallel_linear(x_BTD, layers, self.axis, self.sequence)
        return y_BTO


class ColumnParallelGroup:
    """The column-parallel layers of one module, which all read its first argument."""

    def __init__(self, parent: nn.Module, axis: MeshAxis, sequence: bool) -> None:
        self.axis, self.sequence = axis, sequence
        self.layers: list[ColumnParallelLinear] = []
        # Not a hook: activation checkpointing recomputes by calling `forward`, without hooks.
        parent.forward = partial(self._after_gemms, parent.forward)

    def _after_gemms(self, forward: Callable[..., Any], x: Tensor, *others: Any) -> Any:
        if any(layer.lora or isinstance(layer.weight, FourBitTensor) for layer in self.layers):
            adapted = [layer.adapted() for layer in self.layers]
            ys = adapted_column_parallel_linear(x, adapted, self.axis, self.sequence)
            return self._with_outputs(ys, forward, x, *others)
        parameters = [layer.gemm_parameters() for layer in self.layers]
        float8 = [layer.float8 for layer in self.layers if layer.float8 is not None]
        outputs = column_parallel_linear(x, parameters, self.axis, self.sequence, float8)
        return self._with_outputs(outputs, forward, x, *others)

    def _with_outputs(
        self, outputs: Sequence[Tensor], forward: Callable[..., Any], x: Tensor, *others: Any
    ) -> Any:
        for layer, y in zip(self.layers, outputs):
            layer.output = y
        return forward(x, *others)
