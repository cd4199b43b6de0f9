"""Each source's part of a step's loss, which is summed over the ranks with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.models.counter_dropout import SampleIndices
from workbench.models.seams import token_losses_observed


class SequenceSources(NamedTuple):
    """Sources of a rank's sequences."""

    of_sequence: Sequence[Sequence[int]]
    """[microbatches, sequences]."""
    num_sources: int
    """Of the corpus."""


class SourceLosses:
    """Each source's part of a step's loss [sources], which without aux losses they add up to.

    Args:
        sources: Of this rank's sequences.
        samples: Where the head puts the losses.
        device: Theirs.
    """

    def __init__(
        self, sources: SequenceSources, samples: SampleIndices, device: torch.device
    ) -> None:
        self.sources, self.samples, self.device = sources, samples, device

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Around the step's forward and backward passes: collects the losses of sequences."""
        shape = len(self.sources.of_sequence), len(self.sources.of_sequence[0])
        self.samples.losses_of_step = torch.zeros(shape, dtype=torch.float32, device=self.device)
        with token_losses_observed(self.samples.add_token_losses):
            yield

    def values(self, scale: Tensor | float) -> Tensor:
        """This rank's summands of the parts, 1-D, in the scale of the loss: `scale` is what the
        losses of tokens are multiplied by.
        """
        losses_MB, self.samples.losses_of_step = self.samples.losses_of_step, None
        assert losses_MB is not None
        of_sequence = torch.tensor(self.sources.of_sequence, device=losses_MB.device).flatten()
        sums = losses_MB.new_zeros(self.sources.num_sources)
        return sums.index_add(0, of_sequence, losses_MB.flatten()) * scale
