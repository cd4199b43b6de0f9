"""Forwards of modules with an operator strategy: local computation between redistributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from workbench.kernels import cross_entropy as fused
from workbench.models.counter_dropout import Dropout
from workbench.models.seams import IGNORE_INDEX, HeadLoss, at_least_fp32
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


@dataclass(frozen=True)
class LinearOperator:
    """y = x W^T + bias, sharded by rows, inner dimension (all-reduced) or columns.

    Weight [columns, inner].
    """

    module: nn.Linear
    sharding: OperatorSharding
    float8: Float8Layer | None = None
    """Of fp8 GEMMs: the axes whose ranks hold parts of each tensor."""

    def __call__(self, x: Tensor) -> Tensor:
        """[.., inner] to [.., columns]."""
        weight, bias = self.module.weight, self.module.bias
        local = self.sharding.to_local(x, rows=0, inner=-1)
        if self.float8 is None and "inner" not in self.sharding.placement:
            return self.sharding.to_global(F.linear(local, weight, bias), rows=0, columns=-1)
        y = self._product(local, weight)
        y = self.sharding.reduce_partial(y, rows=0, columns=-1)
        return self.sharding.to_global(y if bias is None else y + bias, rows=0, columns=-1)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T."""
        return F.linear(x, weight) if self.float8 is None else float8_linear(x, weight, self.float8)


@dataclass(frozen=True)
class EmbeddingOperator:
    """Embedding lookup, sharded by rows of tokens, vocabulary (all-reduced) or width.

    Weight [vocabulary, hidden].
    """

    module: nn.Embedding
    sharding: OperatorSharding
    layout: Layout

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """[B, T] to [B, T, D]."""
        local_BT = self.sharding.to_local(tokens_BT, rows=0)
        if "vocabulary" in self.sharding.placement:
            x = embedding_lookup(local_BT, self.module.weight, self.layout.slices[0])
        else:
            x = F.embedding(local_BT, self.module.weight, self.module.padding_idx)
        return self.sharding.to_global(
            self.sharding.reduce_partial(x, rows=0, hidden=-1), rows=0, hidden=-1
        )


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
class DropoutOperator:
    """Dropout of a shard: the mask is that of the tokens and channels which this rank has."""

    grid: RedistributionGrid
    module: Dropout
    forward: ForwardFn

    def __call__(self, x_BTD: Tensor, rows_BT: Tensor | None) -> Tensor:
        """As `Dropout.forward`, sharded as `x_BTD` by sequences or width."""
        if not isinstance(x_BTD, DTensor) or rows_BT is None:
            output: Tensor = self.forward(x_BTD, rows_BT)
            return output
        names = {0: "rows", x_BTD.ndim - 1: "width"}
        placement = tuple(
            None if dim is None else names.get(dim)
            for dim in layout_of(x_BTD).at(x_BTD.device_mesh.ndim)
        )
        sharding = OperatorSharding(self.grid, placement, SharedInputs())
        local, rows = sharding.to_local(x_BTD, rows=0, width=-1), sharding.to_local(rows_BT, rows=0)
        width = [self.grid.axes[(axis,)] for axis, name in enumerate(placement) if name == "width"]
        self.module.first_channel = joint_index(width)[0] * local.shape[-1]
        dropped: Tensor = self.forward(local, rows)
        return sharding.to_global(dropped, rows=0, width=-1)


@dataclass(frozen=True)
class HeadOperator:
    """The head_loss seam: a GEMM sharded as `sharding` says, its loss by rows or vocabulary
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
        projected = F.linear(self.sharding.to_local(x_BTD, rows=0, inner=-1), self.module.weight)
        logits = self._redistribute_for_loss(projected)
        kernels = loss_kernels(self, logits)
        if (self.axis is not None or kernels != "eager") and logits is not projected:
            # The loss overwrites its input, and what DTensor returns may be kept for backward.
            logits = logits.clone()
        logits_NV, targets_N = (
            logits.flatten(0, -2),
            self.loss.to_local(targets_BT, rows=0).flatten(),
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
        return self.loss.restricted_to("rows").reduce_partial(total)

    def _redistribute_for_loss(self, logits: Tensor) -> Tensor:
        logits = self.sharding.reduce_partial(logits, rows=0, columns=-1)
        held = self.sharding.layout(3, {"rows": 0, "columns": 2})
        wanted = self.loss.layout(3, {"rows": 0, "vocabulary": 2})
        if held == wanted:
            return logits
        return self.sharding.grid.redistribute(logits[..., : self.num_columns], held, wanted)
