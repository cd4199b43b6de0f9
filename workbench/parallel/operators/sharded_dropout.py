"""Dropout of a traced module on shards: masks are drawn for the elements of the unsharded tensor.

As `models.counter_dropout`, for tensors of any shape, and within attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.models.counter_dropout import SAMPLE_STRIDE, SampleIndices
from workbench.models.counter_hash import counters_of, random_bits, row_keys
from workbench.models.weight_init import seed_of
from workbench.parallel.operators.factor_redistribution import FactorGrid
from workbench.plan.operators.traced.factors import Factor
from workbench.plan.operators.traced.graph_placement import FactorLayout
from workbench.plan.operators.traced.node_factors import TensorFactors


@dataclass(frozen=True)
class ElementIds:
    """Global indices of the elements of a local tensor.

    A row is all but the last dim; its id is of the sample in the run and of where it lies in the
    sample.

    Attributes:
        factors: Of the tensor.
        layout: Of the tensor.
        grid: The ranks.
        batch: The factor that counts sequences.
        samples: Which samples this forward sees.
        device: Where ids are made.
    """

    factors: TensorFactors
    layout: FactorLayout
    grid: FactorGrid
    batch: Factor | None
    samples: SampleIndices
    device: torch.device

    def rows(self) -> Tensor:
        """Ids [N] of the rows, in memory order."""
        ids = torch.full((), self.samples.first * SAMPLE_STRIDE, device=self.device)
        stride = 1
        of = len(self.factors.sizes) - len(self.factors.dims[-1])
        sizes, local = self.factors.sizes, self.grid.local_sizes(self.factors, self.layout)
        shape = [1] * of
        for at in reversed(range(of)):
            first = self.grid.first(self.layout, at, local[at])
            index = torch.arange(first, first + local[at], device=self.device)
            is_batch = self.factors.factors[at] == self.batch
            each = index * (SAMPLE_STRIDE if is_batch else stride)
            ids = ids + each.view([*shape[:at], -1, *shape[at + 1 :]])
            stride *= 1 if is_batch else sizes[at]
        return ids.flatten()

    def columns(self) -> Tensor:
        """Indices [D] of the last dim."""
        ids, stride = torch.zeros((), dtype=torch.long, device=self.device), 1
        own = len(self.factors.dims[-1])
        local = self.grid.local_sizes(self.factors, self.layout)
        for place in range(own):
            at = len(local) - 1 - place
            first = self.grid.first(self.layout, at, local[at])
            index = torch.arange(first, first + local[at], device=self.device) * stride
            ids = ids + index.view([-1, *([1] * place)])
            stride *= self.factors.sizes[at]
        return ids.flatten()


def dropout(x: Tensor, ids: ElementIds, rate: float, name: str, seed: int) -> Tensor:
    """Dropout of a local tensor, with the mask of the operator `name` under the plan's `seed`."""
    result: Tensor = _Dropout.apply(x, ids.rows(), ids.columns(), rate, seed_of(name, seed))
    return result


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows_N: Tensor, columns_D: Tensor, rate: float, key: int
    ) -> Tensor:
        ctx.save_for_backward(rows_N, columns_D)
        ctx.rate, ctx.key = rate, key
        return _dropped(x, rows_N, columns_D, rate, key)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows_N, columns_D = ctx.saved_tensors
        dropped = _dropped(gradient, rows_N, columns_D, ctx.rate, ctx.key)
        return dropped, None, None, None, None


def _dropped(x: Tensor, rows_N: Tensor, columns_D: Tensor, rate: float, key: int) -> Tensor:
    bits_ND = random_bits(counters_of(columns_D), row_keys(rows_N, key))
    kept = bits_ND >= round(rate * 2**32) - 2**31
    return x * kept.view(x.shape) * (1 / (1 - rate))


def attention_with_dropout(
    inputs: Sequence[Tensor],
    ids: ElementIds,
    rate: float,
    causal: bool,
    scale: float | None,
    name: str,
    seed: int,
) -> Tensor:
    """Scaled dot-product attention whose weights are dropped, with the scores in memory.

    Args:
        inputs: Query, key, value [B, heads, T, depth] and, if there is one, the mask.
        ids: Of the scores [B, heads, T, T].
        rate: Share of weights that are set to zero.
        causal: Whether a token sees only those before it.
        scale: Of the scores; default 1 / sqrt(depth).
        name: Of the operator.
        seed: The plan's.
    """
    query, key, value, *mask = inputs
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (scale or 1 / math.sqrt(query.shape[-1]))
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    for each in mask:
        scores = scores.masked_fill(~each, -math.inf) if each.dtype == torch.bool else scores + each
    wide = scores.float() if scores.element_size() < 4 else scores
    weights = torch.softmax(wide, -1).to(scores.dtype)
    return dropout(weights, ids, rate, name, seed) @ value
