"""What attention does to its scores beside scaling and the causal mask: a sliding window, ALiBi's
biases, a soft-cap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.plan.model.model_shape import Shape


@dataclass(frozen=True)
class ScoreRule:
    """How scores become logits of the softmax: softcap * tanh(scale * q k / softcap) + bias.

    Attributes:
        scale: Factor of q k; None: head_dim^-1/2.
        softcap: Bound of the scaled scores (Gemma 2, arXiv 2408.00118); None: none.
        slopes: ALiBi's slope of each query head, by which scores fall a token of distance (Press et
            al. 2022, arXiv 2108.12409); None: no bias.
        window: A query sees so many keys, its own token's the last (Mistral 7B, arXiv 2310.06825);
            None: all up to it.
    """

    scale: float | None = None
    softcap: float | None = None
    slopes: tuple[float, ...] | None = None
    window: int | None = None

    @classmethod
    def of_layer(cls, shape: Shape, layer: int) -> ScoreRule:
        """The rule of the layer of index `layer`; of every `full_attention_every` layers the last
        has no window.
        """
        every = shape.full_attention_every
        full = every is not None and (layer + 1) % every == 0
        return cls(
            shape.score_scale,
            shape.attention_softcap,
            alibi_slopes(shape.heads) if shape.positions == "alibi" else None,
            None if full else shape.window,
        )

    def scale_of(self, head_dim: int) -> float:
        """The factor of q k for heads of `head_dim` entries."""
        return float(head_dim**-0.5 if self.scale is None else self.scale)

    def is_causal_only(self, length: int) -> bool:
        """Whether over `length` tokens scores are only scaled and masked after each query."""
        windowed = self.window is not None and self.window < length
        return self.softcap is None and self.slopes is None and not windowed

    def for_heads(self, start: int, stop: int, num_heads: int) -> ScoreRule:
        """The rule of query heads [start, stop), padded to `num_heads`."""
        if self.slopes is None:
            return self
        own = self.slopes[start:stop]
        return replace(self, slopes=own + (0.0,) * (num_heads - len(own)))

    def add_to(
        self, scores_BHTS: Tensor, queries: range, keys: range, starts_BT: Tensor | None = None
    ) -> Tensor:
        """`scores_BHTS` with bias and masks added in place.

        Args:
            scores_BHTS: [B, H, T, S], soft-capped.
            queries: Positions of the T queries.
            keys: Positions of the S keys.
            starts_BT: Position of the first token of each query's document, before which it sees
                no key; None: it sees all before it.
        """
        distance_TS = _distance(queries, keys, scores_BHTS.device)
        if self.slopes is not None:
            dtype, device = scores_BHTS.dtype, scores_BHTS.device
            slopes_H11 = torch.tensor(self.slopes, dtype=dtype, device=device)[:, None, None]
            scores_BHTS.addcmul_(slopes_H11, distance_TS.to(dtype), value=-1)
        scores_BHTS.masked_fill_(self._hidden(distance_TS), -torch.inf)
        if starts_BT is not None:
            del distance_TS
            before_BTS = _positions(keys, starts_BT.device) < starts_BT[..., None]
            scores_BHTS.masked_fill_(before_BTS[:, None], -torch.inf)
        return scores_BHTS

    def mask(
        self,
        queries: range,
        keys: range,
        dtype: torch.dtype,
        device: torch.device,
        starts_BT: Tensor | None = None,
    ) -> Tensor:
        """Bias and masks [B or 1, H or 1, T, S] that a kernel adds to scores."""
        batch = 1 if starts_BT is None else len(starts_BT)
        shape = batch, len(self.slopes or (0,)), len(queries), len(keys)
        zeros = torch.zeros(shape, dtype=dtype, device=device)
        return self.add_to(zeros, queries, keys, starts_BT)

    def _hidden(self, distance_TS: Tensor) -> Tensor:
        after = distance_TS < 0
        return after if self.window is None else after.logical_or_(distance_TS >= self.window)


def _distance(queries: range, keys: range, device: torch.device) -> Tensor:
    """Tokens [T, S] from each key to each query, negative for keys after it."""
    return _positions(queries, device)[:, None] - _positions(keys, device)[None, :]


def _positions(of: range, device: torch.device) -> Tensor:
    return torch.arange(of.start, of.stop, device=device)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """ALiBi's slopes of `heads` heads: 2^(-8 i / n) for i from 1 to n, the power of two below, and
    every second slope of twice as many heads for those beyond it, as the paper's code and BLOOM.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return tuple(slopes + [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * power, 2)])[:heads]
