"""Dropout on a tensor grid: a rank's block meets those entries of one device's masks that it
has.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from workbench.models import Transformer
from workbench.models.counter_dropout import SAMPLE, Dropout


def keep_own_masks(model: Transformer, part: tuple[int, int], first: int) -> None:
    """Let a model's dropout know its block of the residual stream: sequences `part` (index, of how
    many) of every microbatch, channels from `first` on.
    """
    for module in model.modules():
        if isinstance(module, Dropout):
            module.first = first
    model.here = partial(own_rows, part, model.embedding is not None)


def own_rows(part: tuple[int, int], whole: bool, rows_BT: Tensor) -> Tensor:
    """The numbers of a block's tokens [B / parts, T], of those that a stage was given: `whole`
    microbatches of tokens, or as many sequences as the block has, counted from the microbatch's
    first.
    """
    index, parts = part
    batch = rows_BT.shape[0] // (parts if whole else 1)
    return rows_BT[:batch] + index * batch * SAMPLE
