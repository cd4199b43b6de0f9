"""A key-value cache, through the `attend` seam: tokens attend to keys and values of earlier calls.

The model is unchanged: its `Attend` modules are substituted, and its `indices` say at which
position a call's tokens are. Tensor-parallel ranks each cache their own heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workbench.models.attention.attention_kernels import repeat_heads
from workbench.models.attention.soft_cap import soft_cap
from workbench.models.block import AnyAttention
from workbench.models.seams import Attend, Positions
from workbench.models.transformer import Transformer


class KvCache:
    """Keys and values of a model's layers, which grow by the tokens of each call.

    Args:
        model: A model of one pipeline stage, whose attention is the plain seam.
        capacity: Most tokens of a sequence.

    Raises:
        ValueError: Attention was replaced, by ring attention say.
    """

    def __init__(self, model: Transformer, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        for block in model.blocks.values():
            attention = block.attention
            assert isinstance(attention, AnyAttention)
            if type(attention.attend) is not Attend:
                raise ValueError(
                    f"{type(attention.attend).__name__} has no key-value cache; legal: a model "
                    "without context parallelism"
                )
            attention.attend = CachedAttend(attention.attend, self)  # type: ignore[assignment]
        model.indices = self._indices

    def _indices(self, x: Tensor) -> Tensor:
        """Positions [T] of a call's tokens, which follow those that are cached."""
        return torch.arange(self.length, self.length + x.shape[1], device=x.device)

    def advance(self, tokens: int) -> None:
        """Count the tokens of a call, once all layers have cached them."""
        self.length += tokens


class CachedAttend(nn.Module):
    """The attend seam of one layer over cached keys and values."""

    def __init__(self, plain: Attend, cache: KvCache) -> None:
        super().__init__()
        self.plain, self.cache = plain, cache
        self.k_BSGK: Tensor | None = None
        self.v_BSGK: Tensor | None = None

    def forward(
        self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, positions: Positions
    ) -> Tensor:
        """Attention output [B, T, heads, head_dim].

        Raises:
            ValueError: The cache is full.
        """
        start, stop = self.cache.length, self.cache.length + q_BTHK.shape[1]
        if stop > self.cache.capacity:
            raise ValueError(
                f"{stop} tokens are more than the key-value cache's {self.cache.capacity}"
            )
        k_BSGK, v_BSGK = self._stored(k_BTGK, v_BTGK, start)
        if start == 0:
            output: Tensor = self.plain(q_BTHK, k_BTGK, v_BTGK, positions)
            return output
        heads, rule = q_BTHK.shape[2], self.plain.rule
        q = q_BTHK.transpose(1, 2)
        k, v = (repeat_heads(x.transpose(1, 2), heads) for x in (k_BSGK, v_BSGK))
        scores_BHTS = soft_cap(q @ k.mT * rule.scale_of(q.shape[-1]), rule.softcap)
        scores_BHTS = rule.add_to(scores_BHTS, range(start, stop), range(stop))
        return (scores_BHTS.softmax(-1) @ v).transpose(1, 2)

    def _stored(self, k_BTGK: Tensor, v_BTGK: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Store a call's keys and values; all of the sequence so far."""
        batch, tokens, groups, head_dim = k_BTGK.shape
        if self.k_BSGK is None or self.v_BSGK is None:
            extent = batch, self.cache.capacity, groups, head_dim
            self.k_BSGK, self.v_BSGK = k_BTGK.new_empty(extent), v_BTGK.new_empty(extent)
        stop = start + tokens
        self.k_BSGK[:, start:stop], self.v_BSGK[:, start:stop] = k_BTGK, v_BTGK
        return self.k_BSGK[:, :stop], self.v_BSGK[:, :stop]
