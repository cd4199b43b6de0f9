"""The reference of preference pairs, computed before the first step: each pair once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from workbench.engine.data.batch_sampler import BatchSampler


class ReferenceTable:
    """Log-probabilities of sequences under the weights that training starts from: 4 bytes for each
    sequence of the corpus, in host memory.

    Sequences are computed in batches of new ones, in the order in which the run first has them: a
    run that resumes computes a sequence beside the same others as the run before it, and so the
    same number.

    Args:
        text: Gives the sequences, and says which of a batch are this rank's.
        log_probs: Of this rank's sequences [M, B] of a batch, by the part of the text ("train" or
            "holdout") and the numbers of the batch's sequences; None on stages without the head.
        device: Of what ranks exchange.
        progress: Called with how many of how many batches are done, after each.
    """

    def __init__(
        self,
        text: BatchSampler,
        log_probs: Callable[[str, np.ndarray], Tensor | None],
        device: torch.device,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        self._text, self._compute = text, log_probs
        self._device, self._progress = device, progress
        self.log_probs: dict[str, Tensor] = {}
        """By the part of the text: of each sequence, -inf where no batch has needed it."""

    def take(self, part: str, known: Tensor | None) -> None:
        """Take log-probabilities that are known already, so that they are not computed again;
        called by all ranks together.

        Args:
            part: "train" or "holdout".
            known: Of each sequence, -inf where it is not known; None on ranks that know none.
        """
        table = self._empty(part)
        if known is not None and known.shape == table.shape:
            table.copy_(known)
        self.log_probs[part] = self._shared(table)

    def compute(self, part: str, batches: Iterable[np.ndarray], first: int = 0) -> None:
        """Compute what batches from `first` on need; called by all ranks together.

        Args:
            part: "train" or "holdout".
            batches: Numbers of the sequences of each of the run's batches.
            first: The first batch that is needed.
        """
        order, needed = self._in_first_order(part, batches, first)
        known = self.log_probs.get(part, self._empty(part).cpu())
        needed &= known.isneginf().numpy()
        size = self._text.global_batch
        starts = [at for at in range(0, len(order), size) if needed[order[at : at + size]].any()]
        table = known.to(self._device)
        for done, start in enumerate(starts, 1):
            places = np.arange(start, start + size)
            # The last batch is filled with sequences that are known already.
            numbers = order[places % len(order)]
            if (found := self._compute(part, numbers)) is not None:
                own = self._text.samples
                at = torch.from_numpy(numbers[own]).to(self._device)
                new = torch.from_numpy(places[own] < len(order)).to(self._device)
                new &= table[at].isneginf()
                table[at[new]] = found[new].to(table.dtype)
            self._progress(done, len(starts))
        self.log_probs[part] = self._shared(table)

    def get(self, part: str, numbers: np.ndarray) -> Tensor:
        """Those of this rank's sequences of a batch, [M, B]."""
        return self.log_probs[part][torch.from_numpy(numbers[self._text.samples])]

    def _empty(self, part: str) -> Tensor:
        return torch.full((self._text.num_sequences(part),), -torch.inf, device=self._device)

    def _shared(self, table: Tensor) -> Tensor:
        """What all ranks know together, in host memory."""
        if dist.is_initialized():
            # Exact: the others have nothing, or the same number.
            dist.all_reduce(table, dist.ReduceOp.MAX)
        return table.cpu()

    def _in_first_order(
        self, part: str, batches: Iterable[np.ndarray], first: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Each sequence once, in the order in which batches have them; and of every sequence of the
        text, whether a batch from `first` on has it.
        """
        seen = np.zeros(self._text.num_sequences(part), bool)
        needed, order = seen.copy(), [np.zeros(0, np.int64)]
        for index, batch in enumerate(batches):
            numbers, at = np.unique(batch, return_index=True)
            order.append(batch[np.sort(at[~seen[numbers]])])
            seen[batch] = True
            needed[batch] |= index >= first
        return np.concatenate(order), needed
