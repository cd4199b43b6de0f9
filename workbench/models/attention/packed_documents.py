"""Documents packed into one sequence, whose tokens attend to their own document alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.models.seams import IGNORE_INDEX


def document_starts(targets_BT: Tensor) -> Tensor:
    """Index in its sequence of the first token of each token's document, [..., T].

    The loss ignores the target of a document's last token, the first token of the next document
    (as Megatron-LM's `--reset-position-ids` and `--eod-mask-loss` together): targets say where
    documents end, on every pipeline stage.

    Args:
        targets_BT: Targets [..., T] of unsharded sequences.
    """
    ends = targets_BT[..., :-1] == IGNORE_INDEX
    indices = torch.arange(targets_BT.shape[-1], device=targets_BT.device)
    return F.pad(ends, (1, 0)).mul(indices).cummax(-1).values
