"""Deterministic sampling of batches, which resumes by sample index on any mesh.

Training text of each source is cut into sequences of `sequence_length` inputs (and one more token,
the last target); `corpora.sample_order` says which of them sample g of the run is. A step takes the
next `global_batch` samples, of which each rank takes its share (`plan.stage_replicas`): all data
coordinates, or all replicas of a stage, have together the batch of one device.

Sequences go over the ends of documents. Where documents are separated the last token of each has no
target (`models/attention/packed_documents.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from workbench.corpora.sample_order import Places, SampleOrder
from workbench.models.seams import IGNORE_INDEX

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.corpora.tokenized_corpus import SourceTokens, TokenizedCorpus
    from workbench.plan.stage_replicas import BatchShare


class BatchContents(NamedTuple):
    """What a step's batch is made of."""

    trained_tokens: np.ndarray
    """Tokens of each source that have a target, over all ranks; int64 [sources]."""
    sources: np.ndarray
    """Source of each of this rank's sequences, [microbatches, sequences]."""


class BatchSampler:
    """Batches of one rank.

    Args:
        corpus: As `tokenized_corpus.load_corpus` returns it.
        sequence_length: Inputs per sequence.
        global_batch: Sequences per step, over all ranks.
        share: Which of them are this rank's, by microbatch.
        seed: Selects the permutations.

    Raises:
        ValueError: The text of a source is shorter than one sequence; names the field.
    """

    def __init__(
        self,
        corpus: TokenizedCorpus,
        sequence_length: int,
        global_batch: int,
        share: BatchShare,
        seed: int = 0,
    ) -> None:
        # A source without weight has no samples, and may be shorter than one.
        self.sources = [one for one in corpus.sources if one.weight > 0]
        self.sequence_length = sequence_length
        self.global_batch = global_batch
        self.seed = seed
        self.samples = np.array(share.samples())
        self.train = self._order("train")
        self._holdout: SampleOrder | None = None
        self._last: tuple[int, Places] | None = None

    def _order(self, part: str) -> SampleOrder:
        counts = [self._sequences(one, part) for one in self.sources]
        return SampleOrder(counts, [one.weight for one in self.sources], self.seed)

    def _sequences(self, source: SourceTokens, part: str) -> int:
        text = getattr(source, part)
        count = (len(text) - 1) // self.sequence_length
        if count < 1:
            what = "training text" if part == "train" else "held-out text"
            of = f" of {source.source}" if len(self.sources) > 1 else ""
            raise ValueError(
                f"training.sequence_length: {self.sequence_length} needs "
                f"{self.sequence_length + 1} tokens, the {what}{of} "
                f"has {len(text)}; take a larger corpus.source, another corpus.holdout or shorter "
                f"sequences"
            )
        return count

    def contents(self, step: int) -> BatchContents:
        """What the batch of `step` is made of."""
        places = self._located(self.sample_index(step))
        return BatchContents(self._with_targets("train", places), places.source[self.samples])

    def evaluated_tokens(self, batch: int, source: int | None = None) -> int:
        """Tokens of an evaluation's `batch` that have a target, over all ranks."""
        samples = batch * self.global_batch + np.arange(self.global_batch)
        return int(self._with_targets("holdout", self._held_out(samples, source)).sum())

    def _with_targets(self, part: str, places: Places) -> np.ndarray:
        counts = np.zeros(len(self.sources), np.int64)
        for i in range(len(self.sources)):
            sequences = places.sequence[places.source == i]
            first, stop = self._boundaries(i, part, sequences)
            counts[i] = len(sequences) * self.sequence_length - (stop - first).sum()
        return counts

    def _boundaries(
        self, source: int, part: str, sequences: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of a source's boundaries the first and the one after the last that is a target of each of
        `sequences`; no such boundaries where documents are not separated.
        """
        one = self.sources[source]
        if one.boundaries is None:
            return np.zeros_like(sequences), np.zeros_like(sequences)
        start = sequences * self.sequence_length + (len(one.train) if part == "holdout" else 0)
        within = start, start + self.sequence_length
        first, stop = (np.searchsorted(one.boundaries, at, side="right") for at in within)
        return first, stop

    def sample_index(self, step: int) -> int:
        """Samples consumed before `step` over all ranks, which checkpoints record."""
        return step * self.global_batch

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of `step` (from 0).

        Returns:
            Two int64 tensors [microbatches, sequences, sequence_length].
        """
        return self.take(self.sample_index(step))

    def take(self, sample: int) -> tuple[Tensor, Tensor]:
        """This rank's part of the global batch from sample index `sample`, as `batch`."""
        places = self._located(sample)
        own = Places(places.source[self.samples], places.sequence[self.samples])
        return self._gather("train", own)

    def _located(self, sample: int) -> Places:
        """Where the samples of the global batch from `sample` are, of which one is remembered."""
        if self._last is None or self._last[0] != sample:
            places = self.train.locate(sample + np.arange(self.global_batch))
            self._last = sample, places
        return self._last[1]

    def evaluation(self, batch: int, source: int | None = None) -> tuple[Tensor, Tensor]:
        """The `batch`-th global batch of the held-out text, unshuffled; shapes as in `batch`.

        Held-out text that is too short wraps around.

        Args:
            batch: From 0.
            source: Index in `sources`; None: all of them by their weights.
        """
        samples = batch * self.global_batch + self.samples
        return self._gather("holdout", self._held_out(samples, source))

    def _held_out(self, samples: np.ndarray, source: int | None) -> Places:
        self._holdout = self._holdout or self._order("holdout")
        if source is None:
            return self._holdout.locate_unshuffled(samples)
        sequences = samples % self._holdout.sequences[source]
        return Places(np.full_like(samples, source), sequences)

    def _gather(self, part: str, places: Places) -> tuple[Tensor, Tensor]:
        length = self.sequence_length
        texts = [getattr(source, part) for source in self.sources]
        flat = [
            texts[source][sequence * length : sequence * length + length + 1].astype(np.int64)
            for source, sequence in zip(places.source.flat, places.sequence.flat, strict=True)
        ]
        rows = np.stack(flat)
        targets = rows[:, 1:].copy()
        self._leave_out_ends(part, places, targets)
        shape = *places.sequence.shape, length
        # torch.tensor copies into torch's own memory, where an allocator count sees it; from_numpy
        # would not.
        return torch.tensor(rows[:, :-1].reshape(shape)), torch.tensor(targets.reshape(shape))

    def _leave_out_ends(self, part: str, places: Places, targets: np.ndarray) -> None:
        """Take their targets [sequences, sequence_length] from the last tokens of documents."""
        for row, (source, sequence) in enumerate(
            zip(places.source.flat, places.sequence.flat, strict=True)
        ):
            one = self.sources[source]
            if one.boundaries is None:
                continue
            (first,), (stop,) = self._boundaries(source, part, np.array([sequence]))
            start = sequence * self.sequence_length
            start += len(one.train) if part == "holdout" else 0
            targets[row, one.boundaries[first:stop] - start - 1] = IGNORE_INDEX
