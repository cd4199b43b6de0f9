"""Perplexity of a model on a text, on any mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from workbench.engine.session import Session
from workbench.models.seams import IGNORE_INDEX
from workbench.parallel.tensor.apply_tensor import counts_own_loss


class Perplexity(NamedTuple):
    """exp of the mean negative log-likelihood of `tokens` predicted tokens."""

    perplexity: float
    tokens: int


def measure_perplexity(session: Session, ids: Sequence[int]) -> Perplexity:
    """Perplexity of token ids; called by all ranks together, equal on all of them.

    The text is cut into windows of the plan's sequence length, each read by itself: its first
    token is predicted by none.

    Args:
        session: The model.
        ids: At least two token ids, below the vocabulary.

    Raises:
        ValueError: There are fewer than two tokens.
    """
    if len(ids) < 2:
        raise ValueError(f"a text of {len(ids)} tokens has none to predict; legal: 2 or more")
    t, data = session.plan.training, session.mesh["data"]
    rows, length = t.global_batch, t.sequence_length
    count = math.ceil(len(ids) / (rows * (length + 1))) * rows
    padded = torch.full((count * (length + 1),), IGNORE_INDEX)
    padded[: len(ids)] = torch.tensor(ids)
    windows = padded.view(-1, data.size, rows // data.size, length + 1)[:, data.index]
    total = torch.zeros(1, dtype=torch.float64)
    for window in windows:  # [microbatches, length + 1]
        inputs, targets = window[:, None, :-1].clamp(min=0), window[:, None, 1:]
        loss = session.evaluate(inputs, targets)
        if loss is not None and counts_own_loss(session.mesh):
            total += loss.double()
    if session.mesh.world_size > 1:
        dist.all_reduce(total)
    predicted = int((padded.view(-1, length + 1)[:, 1:] != IGNORE_INDEX).sum())
    return Perplexity(math.exp(total.item() / predicted), predicted)
