"""Dropout whose masks depend on what is dropped, not on the rank or time that computes it.

Whether an element is kept is a hash of the seed, the module, the sample's index in the run (which
holds the step), the token's position and the channel. Every mesh therefore draws what one device
draws, and backward and activation checkpointing draw masks again instead of saving them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.models.counter_hash import column_counters, random_bits, row_keys
from workbench.models.preference.preference_loss import PreferenceLoss
from workbench.runtime_facts.cast_sizes import DROPOUT_CHUNK_NUMEL

SAMPLE_STRIDE = 2**32
"""Distance of token ids from one sample to the next, at the same position."""


class TokenRows(NamedTuple):
    """Ids of the tokens of a layer (`SampleIndices.rows`), for what drops elements within it."""

    local: Tensor | None
    """Of the tokens of the residual stream [B, T], which sequence parallelism shards."""
    region: Tensor | None
    """Of all tokens that its tensor-parallel region has."""


_NO_ROWS = TokenRows(None, None)
_token_rows: ContextVar[TokenRows] = ContextVar("token_rows", default=_NO_ROWS)


def token_rows() -> TokenRows:
    """Ids of the tokens of the layer that is computed."""
    return _token_rows.get()


@contextmanager
def rows_of_tokens(rows: TokenRows) -> Iterator[None]:
    """A context whose layer has tokens of these ids."""
    before = _token_rows.set(rows)
    try:
        yield
    finally:
        _token_rows.reset(before)


class SampleIndices:
    """Indices in the run of the samples that the next forward sees: `first` and those after it;
    and their documents.

    The training loop sets them at each step, the pipeline executor at each microbatch.

    Attributes:
        starts_of_step: Of every token of this rank's microbatches the index in its sequence of its
            document's first token, [M, B, S] with unsharded sequences; None where a sequence is
            one document.
        losses_of_step: Where the head puts the loss of each sequence, [M, B], without its gradient
            or aux losses; None: nowhere.
        preference: The loss of pairs, in place of the tokens'; None: the tokens'.
    """

    def __init__(self) -> None:
        self.first, self._of_step, self._micro_batch = 0, 0, 0
        self.starts_of_step: Tensor | None = None
        self.losses_of_step: Tensor | None = None
        self.preference: PreferenceLoss | None = None
        self._token_losses: list[Tensor] = []
        self._microbatch = 0

    def start_step(self, first: int, micro_batch: int) -> None:
        """Start a step: this rank's samples are `first` and after, `micro_batch` for each
        microbatch.
        """
        self.first, self._of_step, self._micro_batch = first, first, micro_batch

    def start_microbatch(self, microbatch: int) -> None:
        """Announce the microbatch of the next forward."""
        self.first = self._of_step + microbatch * self._micro_batch
        self._microbatch = microbatch

    def add_token_losses(self, loss_N: Tensor) -> None:
        """Take in losses of the microbatch's tokens, in their order."""
        self._token_losses.append(loss_N)

    def pair_loss(self, token_losses_BT: Tensor) -> Tensor:
        """The `preference` loss of the microbatch, by the losses of its tokens."""
        assert self.preference is not None, "tokens are no pairs"
        return self.preference(token_losses_BT, self._microbatch)

    def record_loss(self, loss: Tensor) -> None:
        """Take in the summed loss of the microbatch, where its tokens' are not known."""
        if self.losses_of_step is None:
            return
        into = self.losses_of_step[self._microbatch]
        if self._token_losses:
            into.copy_(torch.cat(self._token_losses).view(len(into), -1).sum(1))
            self._token_losses.clear()
        else:  # of one sequence
            into.copy_(loss.detach())

    @property
    def document_starts(self) -> Tensor | None:
        """`starts_of_step` of the next forward's sequences, [B, S]."""
        return None if self.starts_of_step is None else self.starts_of_step[self._microbatch]

    def rows(self, batch: int, indices_T: Tensor) -> Tensor:
        """Ids [B, T] of tokens, unique in the run: samples from `first` on, at positions [T]."""
        samples_B = torch.arange(self.first, self.first + batch, device=indices_T.device)
        return (samples_B * SAMPLE_STRIDE)[:, None] + indices_T


class Dropout(nn.Module):
    """Dropout (Srivastava et al. 2014) with counter-based masks; identity in evaluation.

    Args:
        rate: Share of elements that are set to zero; the others are divided by 1 - rate.
        key: The module's own, `seed_of` its global name.

    Attributes:
        first_channel: The channel that inputs start with, where they are a shard of the width.
    """

    def __init__(self, rate: float, key: int) -> None:
        super().__init__()
        self.rate, self.key, self.first_channel = rate, key, 0

    def forward(self, x_BTD: Tensor, rows_BT: Tensor | None) -> Tensor:
        """Drop elements of [B, T, D]; `rows` are the ids of its tokens (`SampleIndices.rows`)."""
        if not self.rate or not self.training:
            return x_BTD
        assert rows_BT is not None, "dropout needs the ids of its tokens"
        dropped: Tensor = _Dropout.apply(x_BTD, rows_BT, self.key, self.rate, self.first_channel)
        return dropped


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, rows_BT: Tensor, key: int, rate: float, first: int
    ) -> Tensor:
        ctx.save_for_backward(rows_BT)
        ctx.key, ctx.rate, ctx.first = key, rate, first
        return apply_dropout(x_BTD, rows_BT, key, rate, first)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, None, None, None, None]:
        return (
            apply_dropout(gradient_BTD, ctx.saved_tensors[0], ctx.key, ctx.rate, ctx.first),
            None,
            None,
            None,
            None,
        )


def apply_dropout(x_BTD: Tensor, rows_BT: Tensor, key: int, rate: float, first: int = 0) -> Tensor:
    """Dropout of [B, T, D], whose channels are `first` and after. It is linear: backward runs the
    same.
    """
    out = x_BTD.new_empty(x_BTD.shape)
    channels = x_BTD.shape[-1]
    keys_N2 = row_keys(rows_BT.flatten(), key)
    for into, part, keys in _chunks(
        max(1, DROPOUT_CHUNK_NUMEL // max(1, channels)),
        out.flatten(0, -2),
        x_BTD.flatten(0, -2),
        keys_N2,
    ):
        torch.mul(part, keep_mask(keys, channels, rate, first), out=into)
    return out.mul_(1 / (1 - rate))


def _chunks(rows: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.split(rows) for x in tensors))


def keep_mask(keys_N2: Tensor, channels: int, rate: float, first: int = 0) -> Tensor:
    """Keep mask [N, D] of channels `first` and after; True with probability 1 - rate, to 2^-32."""
    bits = random_bits(column_counters(first, channels, keys_N2.device), keys_N2)
    output: Tensor = bits >= round(rate * 2**32) - 2**31
    return output
