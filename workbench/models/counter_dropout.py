"""Dropout whose masks depend on what is dropped, not on the rank or time that computes it.

Whether an element is kept is a hash of the seed, the module, the sample's index in the run (which
holds the step), the token's position and the channel: a counter-based generator (Salmon et al.
2011, "Parallel random numbers: as easy as 1, 2, 3"). Every mesh therefore draws what one device
draws, and backward and activation checkpointing draw masks again instead of saving them. Only
integer operations of torch are used, which wrap and are exact on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

CHUNK_NUMEL = 2**22
"""Number of elements whose mask is drawn at a time, so that temporaries do not grow with the
batch.
"""

SAMPLE_STRIDE = 2**32
"""Distance of token ids from one sample to the next, at the same position."""

_ODD = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
"""Constants of splitmix64 (Steele et al. 2014), as signed 64-bit integers."""
_STRIDE, _THIRD, _FOURTH = 0x9E3779B9 - 2**32, 0x7FEB352D, 0x846CA68B - 2**32
"""Constants of a 32-bit finalizer of low bias (Wellons 2018)."""


class SampleIndices:
    """Indices in the run of the samples that the next forward sees: `first` and those after it.

    The training loop sets them at each step, the pipeline executor at each microbatch.
    """

    def __init__(self) -> None:
        self.first, self._of_step, self._micro_batch = 0, 0, 0

    def start_step(self, first: int, micro_batch: int) -> None:
        """Start a step: this rank's samples are `first` and after, `micro_batch` for each
        microbatch.
        """
        self.first, self._of_step, self._micro_batch = first, first, micro_batch

    def start_microbatch(self, microbatch: int) -> None:
        """Announce the microbatch of the next forward."""
        self.first = self._of_step + microbatch * self._micro_batch

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
        max(1, CHUNK_NUMEL // channels), out.flatten(0, -2), x_BTD.flatten(0, -2), keys_N2
    ):
        torch.mul(part, keep_mask(keys, channels, rate, first), out=into)
    return out.mul_(1 / (1 - rate))


def _chunks(rows: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.split(rows) for x in tensors))


def row_keys(rows_N: Tensor, key: int) -> Tensor:
    """Two 32-bit keys [N, 2] for each token: a hash of its 64-bit id and the module's key."""
    mixed = rows_N * _ODD + (key & 2**63 - 1)
    mixed = (mixed ^ _shift_right(mixed, 30, 64)) * _FIRST
    mixed = (mixed ^ _shift_right(mixed, 27, 64)) * _SECOND
    return (mixed ^ _shift_right(mixed, 31, 64))[:, None].view(torch.int32)


def keep_mask(keys_N2: Tensor, channels: int, rate: float, first: int = 0) -> Tensor:
    """Keep mask [N, D] of channels `first` and after; True with probability 1 - rate, to 2^-32."""
    first_N1, second_N1 = keys_N2.split(1, dim=1)
    bits = (
        torch.arange(first, first + channels, dtype=torch.int32, device=keys_N2.device) * _STRIDE
        + first_N1
    )
    bits.bitwise_xor_(_shift_right(bits, 16, 32)).mul_(_THIRD).bitwise_xor_(second_N1)
    bits.bitwise_xor_(_shift_right(bits, 15, 32)).mul_(_FOURTH)
    bits.bitwise_xor_(_shift_right(bits, 16, 32))
    output: Tensor = bits >= round(rate * 2**32) - 2**31
    return output


def _shift_right(x: Tensor, by: int, width: int) -> Tensor:
    """Logical right shift; torch's own is arithmetic and repeats the sign."""
    return (x >> by).bitwise_and_(2 ** (width - by) - 1)
