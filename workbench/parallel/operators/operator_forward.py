"""Forwards of modules with an operator strategy: local computation between redistributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from workbench.kernels import cross_entropy as fused
from workbench.models.seams import IGNORE_INDEX, HeadLoss, at_least_fp32
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.operators.redistribution import (
    OperatorSharding,
    SharedInputs,
    redistribute_between,
    replicated,
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

    def __call__(self, x: Tensor) -> Tensor:
        """[.., inner] to [.., columns]."""
        weight, bias = self.module.weight, self.module.bias
        local = self.sharding.to_local(x, rows=0, inner=-1)
        if "inner" not in self.sharding.placement:
            return self.sharding.to_global(F.linear(local, weight, bias), rows=0, columns=-1)
        y = self.sharding.reduce_partial(F.linear(local, weight), rows=0, columns=-1)
        return self.sharding.to_global(y if bias is None else y + bias, rows=0, columns=-1)


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
class SelfAttentionOperator:
    """`nn.MultiheadAttention` with its projections, sharded by rows or heads.

    The rows of one head are not contiguous in the joint projection of query, key and value, so that
    every rank holds all of it and uses those of its heads.

    Attributes:
        part: Which of `parts` ranges of heads this rank has.
    """

    module: nn.MultiheadAttention
    sharding: OperatorSharding
    part: int
    parts: int

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """[B, T, D] each to ([B, T, D], None): attention weights are not returned."""
        assert key_padding_mask is None, "sharded attention takes no key_padding_mask"
        assert attn_mask is None or attn_mask.ndim == 2, "sharded attention takes masks of [T, T]"
        out, bias = self.module.out_proj.weight, self.module.out_proj.bias
        q, k, v = (
            self._heads(self.sharding.to_local(x, rows=0), i)
            for i, x in enumerate((query, key, value))
        )
        mask = (
            attn_mask.logical_not()
            if attn_mask is not None and attn_mask.dtype == torch.bool
            else attn_mask
        )
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal and mask is None
        )
        y = self.sharding.reduce_partial(
            F.linear(attended.transpose(1, 2).flatten(-2), out), rows=0
        )
        return self.sharding.to_global(y if bias is None else y + bias, rows=0), None

    def _heads(self, x_BTD: Tensor, which: int) -> Tensor:
        """Query, key or value (`which`) of this rank's heads, [B, heads, T, head_dim]."""
        width, head = self.module.embed_dim, self.module.head_dim
        first, own = which * width + self.part * width // self.parts, width // self.parts
        weight, bias = self.module.in_proj_weight, self.module.in_proj_bias
        part = F.linear(x_BTD, weight[first:][:own], None if bias is None else bias[first:][:own])
        output: Tensor = part.unflatten(-1, (-1, head)).transpose(1, 2)
        return output


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

    forward: ForwardFn
    dims: tuple[int, ...] | None
    """Dims that may be sharded; None: any."""

    def __call__(self, *inputs: Any) -> Any:
        """Run the module; other inputs are redistributed to the sharding of the first."""
        first = next((x for x in inputs if isinstance(x, DTensor)), None)
        if first is None:
            return self.forward(*inputs)
        names = tuple(self._name(p, first.ndim) for p in first.placements)
        if not any(names):
            return self.forward(*map(replicated, inputs))
        dims = {name: int(name) for name in names if name is not None}
        sharding = OperatorSharding(first.device_mesh, names, SharedInputs())
        return LocalOperator(self.forward, sharding, dims)(*inputs)

    def _name(self, placement: Any, num_dims: int) -> str | None:
        shardable = isinstance(placement, Shard) and (
            self.dims is None or placement.dim in self.dims
        )
        return str(placement.dim) if shardable else None


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
        columns, wanted = {"rows": 0, "columns": 2}, {"rows": 0, "vocabulary": 2}
        if self.sharding.placements(3, columns) == self.loss.placements(3, wanted):
            return logits
        return redistribute_between(
            logits[..., : self.num_columns], self.sharding, columns, self.loss, wanted
        )
