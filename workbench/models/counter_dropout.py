"""Dropout whose masks depend on what is dropped, not on who computes it or when (Srivastava et al.
2014).

Whether an entry is kept is a hash of the seed, the module, the sample's index in the run (which
holds the step), the token's place in its sequence and the channel: a counter-based generator
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). So every mesh draws what one
device draws, and backward and recomputation draw it again instead of keeping masks. Only integer
operations of torch are used, which wrap and are exact on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

PIECE = 2**22
"""Entries whose mask is drawn at once: what drawing needs for a moment does not grow with the
batch.
"""

SAMPLE = 2**32
"""From a token's number to that of the same place in the next sample."""

_ODD = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
"""Of splitmix64 (Steele et al. 2014); 64 bits as torch's signed integers hold them."""
_STRIDE, _THIRD, _FOURTH = 0x9E3779B9 - 2**32, 0x7FEB352D, 0x846CA68B - 2**32
"""Of a 32-bit finaliser of low bias (Wellons 2018)."""


class Samples:
    """Which samples of the run a model is about to see: `first`, and those after it. Whoever trains
    it says so.
    """

    def __init__(self) -> None:
        self.first, self._of_step, self._micro_batch = 0, 0, 0

    def start(self, first: int, micro_batch: int) -> None:
        """Begin a step whose samples here are `first` and those after it, `micro_batch` a
        microbatch.
        """
        self.first, self._of_step, self._micro_batch = first, first, micro_batch

    def take(self, microbatch: int) -> None:
        """The next forward is of this microbatch."""
        self.first = self._of_step + microbatch * self._micro_batch

    def rows(self, batch: int, indices_T: Tensor) -> Tensor:
        """A number [B, T] for each token of the run: of samples from `first` on, at the places
        `indices` [T].
        """
        samples_B = torch.arange(self.first, self.first + batch, device=indices_T.device)
        return (samples_B * SAMPLE)[:, None] + indices_T


class Dropout(nn.Module):
    """Sets a share `rate` of the entries to zero and divides the others by 1 - rate; in evaluation,
    nothing.

    `key` is the module's own, as `seed_of` its global name gives it; `first` is the channel that
    its input begins with, where that is a part of the width.
    """

    def __init__(self, rate: float, key: int) -> None:
        super().__init__()
        self.rate, self.key, self.first = rate, key, 0

    def forward(self, x_BTD: Tensor, rows_BT: Tensor | None) -> Tensor:
        """[B, T, D] to the same; `rows` say which tokens these are (`Samples.rows`)."""
        if not self.rate or not self.training:
            return x_BTD
        assert rows_BT is not None, "dropout must be told which tokens it sees"
        dropped: Tensor = _Drop.apply(x_BTD, rows_BT, self.key, self.rate, self.first)
        return dropped


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, rows_BT: Tensor, key: int, rate: float, first: int
    ) -> Tensor:
        ctx.save_for_backward(rows_BT)
        ctx.key, ctx.rate, ctx.first = key, rate, first
        return drop(x_BTD, rows_BT, key, rate, first)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, None, None, None, None]:
        return (
            drop(gradient_BTD, ctx.saved_tensors[0], ctx.key, ctx.rate, ctx.first),
            None,
            None,
            None,
            None,
        )


def drop(x_BTD: Tensor, rows_BT: Tensor, key: int, rate: float, first: int = 0) -> Tensor:
    """What dropout makes of channels `first` and after, [B, T, D]; linear in it."""
    out = x_BTD.new_empty(x_BTD.shape)
    channels = x_BTD.shape[-1]
    keys_N2 = row_keys(rows_BT.flatten(), key)
    for into, part, keys in _pieces(
        max(1, PIECE // channels), out.flatten(0, -2), x_BTD.flatten(0, -2), keys_N2
    ):
        torch.mul(part, kept(keys, channels, rate, first), out=into)
    return out.mul_(1 / (1 - rate))


def _pieces(rows: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.split(rows) for x in tensors))


def row_keys(rows_N: Tensor, key: int) -> Tensor:
    """Two 32-bit keys [N, 2] of each row: its 64-bit number and the module's key, mixed."""
    mixed = rows_N * _ODD + (key & 2**63 - 1)
    mixed = (mixed ^ _shifted(mixed, 30, 64)) * _FIRST
    mixed = (mixed ^ _shifted(mixed, 27, 64)) * _SECOND
    return (mixed ^ _shifted(mixed, 31, 64))[:, None].view(torch.int32)


def kept(keys_N2: Tensor, channels: int, rate: float, first: int = 0) -> Tensor:
    """Which of `channels` entries of each row, from `first` on, stay: [N, D]; each does with
    probability 1 - rate, to 2^-32.
    """
    first_N1, second_N1 = keys_N2.split(1, dim=1)
    bits = (
        torch.arange(first, first + channels, dtype=torch.int32, device=keys_N2.device) * _STRIDE
        + first_N1
    )
    bits.bitwise_xor_(_shifted(bits, 16, 32)).mul_(_THIRD).bitwise_xor_(second_N1)
    bits.bitwise_xor_(_shifted(bits, 15, 32)).mul_(_FOURTH)
    bits.bitwise_xor_(_shifted(bits, 16, 32))
    return bits >= round(rate * 2**32) - 2**31


def _shifted(x: Tensor, by: int, width: int) -> Tensor:
    """Bits shifted right with zeros following; torch's own shift repeats the sign."""
    return (x >> by).bitwise_and_(2 ** (width - by) - 1)
