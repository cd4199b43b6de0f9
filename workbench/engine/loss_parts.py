"""Parts of a step's loss that are summed over the ranks with it: each source's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from workbench.engine.step_observer import Observer
from workbench.models.counter_dropout import SampleIndices
from workbench.models.seams import token_losses_observed
from workbench.parallel.pipeline.schedule_executor import ScheduleExecutor


class LossParts(Protocol):
    """What a step computes beside its loss."""

    def observed(
        self,
        executor: ScheduleExecutor,
        own: tuple[Tensor, Tensor],
        trained_tokens: int,
        watch: Observer,
    ) -> AbstractContextManager[None]:
        """A context around the step's forward and backward passes.

        Args:
            executor: Runs this rank's stages.
            own: This rank's tokens and targets [M, B, T], of its part of the sequences.
            trained_tokens: Tokens of the global batch that have a target.
            watch: Observes what is computed before the passes.
        """
        ...

    def values(self, scale: Tensor | float) -> Tensor:
        """This rank's summands of the parts, 1-D, in the scale of the loss: `scale` is what the
        losses of tokens are multiplied by.
        """
        ...


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
    """

    def __init__(self, sources: SequenceSources, samples: SampleIndices) -> None:
        self.sources, self.samples = sources, samples

    @contextmanager
    def observed(
        self,
        executor: ScheduleExecutor,
        own: tuple[Tensor, Tensor],
        trained_tokens: int,
        watch: Observer,
    ) -> Iterator[None]:
        """See `LossParts`."""
        tokens_MBT, _ = own
        self.samples.losses_of_step = torch.zeros(
            tokens_MBT.shape[:2], dtype=torch.float32, device=tokens_MBT.device
        )
        with token_losses_observed(self.samples.add_token_losses):
            yield

    def values(self, scale: Tensor | float) -> Tensor:
        """See `LossParts`."""
        losses_MB, self.samples.losses_of_step = self.samples.losses_of_step, None
        assert losses_MB is not None
        of_sequence = torch.tensor(self.sources.of_sequence, device=losses_MB.device).flatten()
        sums = losses_MB.new_zeros(self.sources.num_sources)
        return sums.index_add(0, of_sequence, losses_MB.flatten()) * scale
