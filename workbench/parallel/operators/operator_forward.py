"""What an operator does with its parts: the forward of each kind of module, on local tensors."""

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
from workbench.parallel.operators.redistribution import Shared, Split, moved, whole
from workbench.parallel.tensor.vocab_parallel import (
    embedding_lookup,
    loss_kernels,
    vocab_parallel_cross_entropy,
)

Forward = Callable[..., Any]


@dataclass(frozen=True)
class MatMul:
    """y = x W^T + bias, split by rows, by its inner dimension (summed) and by columns. Weight
    [columns, inner].
    """

    module: nn.Linear
    split: Split

    def __call__(self, x: Tensor) -> Tensor:
        """[.., inner] to [.., columns]."""
        weight, bias = self.module.weight, self.module.bias
        local = self.split.enter(x, rows=0, inner=-1)
        if "inner" not in self.split.placement:
            return self.split.leave(F.linear(local, weight, bias), rows=0, columns=-1)
        y = self.split.settled(F.linear(local, weight), rows=0, columns=-1)
        return self.split.leave(y if bias is None else y + bias, rows=0, columns=-1)


@dataclass(frozen=True)
class Embedding:
    """Rows of a table, split by rows of tokens, by vocabulary (summed) and by width. Weight
    [vocabulary, hidden].
    """

    module: nn.Embedding
    split: Split
    layout: Layout

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """[B, T] to [B, T, D]."""
        local_BT = self.split.enter(tokens_BT, rows=0)
        if "vocabulary" in self.split.placement:
            x = embedding_lookup(local_BT, self.module.weight, self.layout.slices[0])
        else:
            x = F.embedding(local_BT, self.module.weight, self.module.padding_idx)
        return self.split.leave(self.split.settled(x, rows=0, hidden=-1), rows=0, hidden=-1)


@dataclass(frozen=True)
class SelfAttention:
    """`nn.MultiheadAttention` by rows and by heads, projections and all; this rank has heads `part`
    of `parts`.

    The joint projection of query, key and value is no run of rows by heads, so that every rank
    holds it whole.
    """

    module: nn.MultiheadAttention
    split: Split
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
        """[B, T, D] each to ([B, T, D], None): weights are not told."""
        assert key_padding_mask is None, "split attention takes no key_padding_mask"
        assert attn_mask is None or attn_mask.ndim == 2, "split attention takes masks of [T, T]"
        out, bias = self.module.out_proj.weight, self.module.out_proj.bias
        q, k, v = (
            self._heads(self.split.enter(x, rows=0), i) for i, x in enumerate((query, key, value))
        )
        mask = (
            attn_mask.logical_not()
            if attn_mask is not None and attn_mask.dtype == torch.bool
            else attn_mask
        )
        made = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal and mask is None
        )
        y = self.split.settled(F.linear(made.transpose(1, 2).flatten(-2), out), rows=0)
        return self.split.leave(y if bias is None else y + bias, rows=0), None

    def _heads(self, x_BTD: Tensor, which: int) -> Tensor:
        """The query, key or value of this rank's heads, [B, heads, T, K]."""
        width, head = self.module.embed_dim, self.module.head_dim
        first, own = which * width + self.part * width // self.parts, width // self.parts
        weight, bias = self.module.in_proj_weight, self.module.in_proj_bias
        part = F.linear(x_BTD, weight[first:][:own], None if bias is None else bias[first:][:own])
        return part.unflatten(-1, (-1, head)).transpose(1, 2)


@dataclass(frozen=True)
class Local:
    """A module that computes each of its parts by itself: `dims` of inputs and outputs may be
    split.
    """

    forward: Forward
    split: Split
    dims: dict[str, int]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """As the module, on this rank's part; what is no tensor, or is named in the call, stays as
        it is.
        """
        mine = [self.split.enter(x, **self.dims) if isinstance(x, Tensor) else x for x in inputs]
        made = self.forward(*mine, **named)
        if isinstance(made, tuple):
            return tuple(self.split.leave(y, **self.dims) for y in made)
        return self.split.leave(made, **self.dims)


@dataclass(frozen=True)
class Follow:
    """A module that no strategy names, of a kind that computes its parts by itself: as its first
    input lies.
    """

    forward: Forward
    dims: tuple[int, ...] | None
    """Dimensions that may be split; None: any."""

    def __call__(self, *inputs: Any) -> Any:
        """As the module; what is split otherwise than the first input is redistributed."""
        first = next((x for x in inputs if isinstance(x, DTensor)), None)
        if first is None:
            return self.forward(*inputs)
        names = tuple(self._name(p, first.ndim) for p in first.placements)
        if not any(names):
            return self.forward(*map(whole, inputs))
        dims = {name: int(name) for name in names if name is not None}
        split = Split(first.device_mesh, names, Shared())
        return Local(self.forward, split, dims)(*inputs)

    def _name(self, placement: Any, num_dims: int) -> str | None:
        kept = isinstance(placement, Shard) and (self.dims is None or placement.dim in self.dims)
        return str(placement.dim) if kept else None


@dataclass(frozen=True)
class Head:
    """The head_loss seam: a product by columns, whose logits the loss takes by rows and by
    vocabulary.
    """

    module: HeadLoss
    split: Split
    loss: Split
    rows: tuple[int, int]
    """Of the vocabulary, what this rank's loss sees."""
    held: int
    """Columns of this rank's logits that are no padding."""
    axis: MeshAxis | None
    """Over which the loss splits the vocabulary."""
    kernels: str = "eager"
    """What runs the loss: the plan's kernels."""
    plain_below: int = 0
    """Of how many logits on."""

    def __call__(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Sum over valid tokens of the negative log-likelihood; a scalar, equal on every rank."""
        made = F.linear(self.split.enter(x_BTD, rows=0, inner=-1), self.module.weight)
        logits = self._as_the_loss_wants(made)
        kernels = loss_kernels(self, logits)
        if (self.axis is not None or kernels != "eager") and logits is not made:
            logits = (
                logits.clone()
            )  # the loss uses them up, and what DTensor hands out must stay as it is
        logits_NV, targets_N = logits.flatten(0, -2), self.loss.enter(targets_BT, rows=0).flatten()
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
        return self.loss.only("rows").settled(total)

    def _as_the_loss_wants(self, logits: Tensor) -> Tensor:
        logits = self.split.settled(logits, rows=0, columns=-1)
        held, wanted = {"rows": 0, "columns": 2}, {"rows": 0, "vocabulary": 2}
        if self.split.lies(3, held) == self.loss.lies(3, wanted):
            return logits
        return moved(logits[..., : self.held], self.split, held, self.loss, wanted)
