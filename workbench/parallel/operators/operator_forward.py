"""Forwards of modules with an operator strategy: local computation between redistributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from workbench.kernels import cross_entropy as fused
from workbench.models.counter_dropout import Dropout
from workbench.models.seams import IGNORE_INDEX, HeadLoss, Positions, at_least_fp32
from workbench.parallel.float8.float8_linear import Float8Layer, float8_linear
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.operators.operator_grid import joint_index
from workbench.parallel.operators.redistribution import (
    OperatorSharding,
    RedistributionGrid,
    SharedInputs,
    layout_of,
)
from workbench.parallel.tensor.vocab_parallel import (
    embedding_lookup,
    loss_kernels,
    vocab_parallel_cross_entropy,
)

ForwardFn = Callable[..., Any]
TOKEN_DIMS = {"rows": 0, "tokens": 1}
"""Dims of sequences and of their tokens in every activation."""


@dataclass(frozen=True)
class LinearOperator:
    """y = x W^T + bias, sharded by rows, tokens, columns or inner dimension, over which it is
    all-reduced or reduce-scattered by tokens.

    Weight [columns, inner].
    """

    module: nn.Linear
    sharding: OperatorSharding
    float8: Float8Layer | None = None
    """Of fp8 GEMMs: the axes whose ranks hold parts of each tensor."""

    def __call__(self, x: Tensor) -> Tensor:
        """[.., inner] to [.., columns]."""
        weight, bias = self.module.weight, self.module.bias
        local = self.sharding.to_local(x, **TOKEN_DIMS, inner=-1)
        if self.float8 is None and "inner" not in self.sharding.placement:
            with self.sharding.reading(local):
                y = F.linear(local, weight, bias)
            return self.sharding.to_global(y, **TOKEN_DIMS, columns=-1)
        y = self._product(local, weight)
        y = self.sharding.reduce_partial(y, **TOKEN_DIMS, columns=-1)
        y = y if bias is None else y + bias
        return self.sharding.to_global(y, **TOKEN_DIMS, columns=-1)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T."""
        if self.float8 is not None:
            return float8_linear(x, weight, self.float8)
        with self.sharding.reading(x):
            return F.linear(x, weight)


@dataclass(frozen=True)
class EmbeddingOperator:
    """Embedding lookup, sharded by rows, tokens, width or vocabulary, over which it is all-reduced
    or reduce-scattered by tokens.

    Weight [vocabulary, hidden].
    """

    module: nn.Embedding
    sharding: OperatorSharding
    layout: Layout

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """[B, T] to [B, T, D]."""
        local_BT = self.sharding.to_local(tokens_BT, **TOKEN_DIMS)
        if "vocabulary" in self.sharding.placement:
            x = embedding_lookup(local_BT, self.module.weight, self.layout.slices[0])
        else:
            x = F.embedding(local_BT, self.module.weight, self.module.padding_idx)
        x = self.sharding.reduce_partial(x, **TOKEN_DIMS, hidden=-1)
        return self.sharding.to_global(x, **TOKEN_DIMS, hidden=-1)


@dataclass(frozen=True)
class PositionsOperator:
    """Lookup of learned positions for the tokens that a rank has. The table's gradient is left as
    the part that these make of it: it is summed once a step.

    Weight [positions, hidden].
    """

    module: nn.Embedding
    sharding: OperatorSharding

    def __call__(self, indices_T: Tensor) -> Tensor:
        """[T] to [T, D]."""
        own, dims = self.sharding, {"tokens": 0}
        rows_TD = F.embedding(own.to_local(indices_T, **dims), self.module.weight)
        return own.grid.dtensor(rows_TD, own.layout(2, dims), own.partial_layout(2, dims))


@dataclass(frozen=True)
class LocalOperator:
    """A module that computes shards independently: `dims` of inputs and outputs may be sharded."""

    forward: ForwardFn
    sharding: OperatorSharding
    dims: dict[str, int]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the module on this rank's shards; keyword arguments and non-tensors are passed on."""
        local = [
            self.sharding.to_local(x, **self.dims) if isinstance(x, Tensor) else x for x in inputs
        ]
        outputs = self.forward(*local, **named)
        if isinstance(outputs, tuple):
            return tuple(self.sharding.to_global(y, **self.dims) for y in outputs)
        return self.sharding.to_global(outputs, **self.dims)


@dataclass(frozen=True)
class FollowInput:
    """A module without a strategy that computes shards independently: sharded as its first
    input.
    """

    grid: RedistributionGrid
    forward: ForwardFn
    dims: tuple[int, ...] | None
    """Dims that may be sharded; None: any."""

    def __call__(self, *inputs: Any) -> Any:
        """Run the module; other inputs are redistributed to the sharding of the first."""
        first = next((x for x in inputs if isinstance(x, DTensor)), None)
        if first is None:
            return self.forward(*inputs)
        at = layout_of(first).at(first.device_mesh.ndim)
        followed = [dim for dim in at if self.dims is None or dim in self.dims]
        names = tuple(str(dim) if dim in followed and dim is not None else None for dim in at)
        if not any(names):
            return self.forward(*map(self.grid.replicated, inputs))
        dims = {name: int(name) for name in names if name is not None}
        sharding = OperatorSharding(self.grid, names, SharedInputs())
        return LocalOperator(self.forward, sharding, dims)(*inputs)


@dataclass(frozen=True)
class RopeOperator(FollowInput):
    """Rotary positions without a strategy: a rank that has some of the tokens takes their rows of
    the tables.
    """

    dims: tuple[int, ...] | None = (0, 1, 2)

    def __call__(self, q_BTHK: Tensor, k_BTHK: Tensor, positions: Positions) -> Any:
        """As `Rope.forward`."""
        first = next((x for x in (q_BTHK, k_BTHK) if isinstance(x, DTensor)), None)
        axes = () if first is None else layout_of(first).dims[1]
        if axes:
            index, count = joint_index([self.grid.axes[(axis,)] for axis in axes])
            own = slice(*(at * len(positions.cos) // count for at in (index, index + 1)))
            positions = positions._replace(cos=positions.cos[own], sin=positions.sin[own])
        return super().__call__(q_BTHK, k_BTHK, positions)


@dataclass(frozen=True)
class DropoutOperator:
    """Dropout of a shard: the mask is that of the tokens and channels which this rank has."""

    grid: RedistributionGrid
    module: Dropout
    forward: ForwardFn

    def __call__(self, x_BTD: Tensor, rows_BT: Tensor | None) -> Tensor:
        """As `Dropout.forward`, sharded as `x_BTD` by sequences, tokens or width."""
        if not isinstance(x_BTD, DTensor) or rows_BT is None:
            output: Tensor = self.forward(x_BTD, rows_BT)
            return output
        names = {0: "rows", 1: "tokens", x_BTD.ndim - 1: "width"}
        placement = tuple(
            None if dim is None else names.get(dim)
            for dim in layout_of(x_BTD).at(x_BTD.device_mesh.ndim)
        )
        sharding = OperatorSharding(self.grid, placement, SharedInputs())
        local = sharding.to_local(x_BTD, **TOKEN_DIMS, width=-1)
        rows = sharding.to_local(rows_BT, **TOKEN_DIMS)
        width = [self.grid.axes[(axis,)] for axis, name in enumerate(placement) if name == "width"]
        self.module.first_channel = joint_index(width)[0] * local.shape[-1]
        dropped: Tensor = self.forward(local, rows)
        return sharding.to_global(dropped, **TOKEN_DIMS, width=-1)


@dataclass(frozen=True)
class HeadOperator:
    """The head_loss seam: a GEMM sharded as `sharding` says, its loss by rows, tokens or vocabulary
    (`loss`).
    """

    module: HeadLoss
    sharding: OperatorSharding
    loss: OperatorSharding
    rows: tuple[int, int]
    """[start, stop) of the vocabulary that this rank's loss sees."""
    num_columns: int
    """Columns of this rank's logits without padding."""
    axis: MeshAxis | None
    """The axis over which the loss shards the vocabulary."""
    kernels: str = "eager"
    """Kernels of the loss: the plan's."""
    plain_below: int = 0
    """Minimum number of logits for these kernels; below it the loss runs in eager mode."""

    def __call__(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Sum over valid tokens of the negative log-likelihood; a scalar, equal on every rank."""
        projected = self._projected(x_BTD)
        logits = self._redistribute_for_loss(projected)
        kernels = loss_kernels(self, logits)
        if (self.axis is not None or kernels != "eager") and logits is not projected:
            # The loss overwrites its input, and what DTensor returns may be kept for backward.
            logits = logits.clone()
        logits_NV, targets_N = (
            logits.flatten(0, -2),
            self.loss.to_local(targets_BT, **TOKEN_DIMS).flatten(),
        )
        if self.axis is not None:
            total = vocab_parallel_cross_entropy(
                logits_NV, targets_N, self.rows, self.axis, kernels
            )
        elif kernels != "eager":
            total = fused.cross_entropy(logits_NV, targets_N, self.rows, kernels=kernels)
        else:
            logits_NV = at_least_fp32(logits_NV[:, : self.rows[1]])
            total = F.cross_entropy(
                logits_NV, targets_N, reduction="sum", ignore_index=IGNORE_INDEX
            )
        return self.loss.restricted_to("rows", "tokens").reduce_partial(total)

    def _projected(self, x_BTD: Tensor) -> Tensor:
        """The GEMM of the head, which alone reads its input: no one keeps that redistributed."""
        own = replace(self.sharding, shared=SharedInputs())
        local = own.to_local(x_BTD, **TOKEN_DIMS, inner=-1)
        with own.reading(local):
            return F.linear(local, self.module.weight)

    def _redistribute_for_loss(self, logits: Tensor) -> Tensor:
        logits = self.sharding.reduce_partial(logits, **TOKEN_DIMS, columns=-1)
        held = self.sharding.layout(3, TOKEN_DIMS | {"columns": 2})
        wanted = self.loss.layout(3, TOKEN_DIMS | {"vocabulary": 2})
        if held == wanted:
            return logits
        return self.sharding.grid.redistribute(logits[..., : self.num_columns], held, wanted)
