"""The head_loss seam as logits: what a model predicts, in place of its loss."""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.models.attention.soft_cap import soft_cap
from workbench.models.seams import at_least_fp32


class LogitsHead(nn.Module):
    """Logits of the last tokens of a call, equal on every tensor-parallel rank.

    Args:
        head: The head of a plain or of a vocabulary-parallel model.
        vocab: Entries of the vocabulary.
        last: Number of last tokens; None: all.
    """

    def __init__(self, head: nn.Module, vocab: int, last: int | None = None) -> None:
        super().__init__()
        self.head, self.vocab, self.last = head, vocab, last

    def forward(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Logits [B, T, V], fp32 or better; `targets_BT` is not used."""
        x_BTD = x_BTD if self.last is None else x_BTD[:, -self.last :]
        weight = self.head.weight
        assert isinstance(weight, Tensor)
        own_BTV = at_least_fp32(F.linear(x_BTD, weight))
        own_BTV = soft_cap(own_BTV, self.head.softcap)  # type: ignore[arg-type]
        axis = getattr(self.head, "axis", None)
        if axis is None:
            return own_BTV
        start, stop = self.head.rows  # type: ignore[misc]
        logits_BTV = own_BTV.new_zeros(*own_BTV.shape[:-1], self.vocab)
        logits_BTV[..., start:stop] = own_BTV[..., : stop - start]
        dist.all_reduce(logits_BTV, group=axis.group)
        return logits_BTV
