"""Deterministic sampling of batches, which resumes by sample index on any mesh.

Each source has its sequences: windows of text, or conversations (`text_sequences`,
`conversation_sequences`); `corpora.sample_order` says which of them sample g of the run is. A step
takes the next `global_batch` samples, of which each rank takes its share (`plan.stage_replicas`):
all data coordinates, or all replicas of a stage, have together the batch of one device.

The two sequences of a preference pair are samples 2i and 2i + 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from workbench.corpora.sample_order import Places, SampleOrder
from workbench.engine.data.conversation_sequences import ConversationSequences
from workbench.engine.data.text_sequences import TextSequences
from workbench.errors import refuse
from workbench.runtime_facts.conversation_fields import PREFERENCES

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.corpora.tokenized_corpus import SourceTokens, TokenizedCorpus
    from workbench.plan.stage_replicas import BatchShare

Sequences = TextSequences | ConversationSequences


class Batch(NamedTuple):
    """Sequences of a step; each int64 [microbatches, sequences, sequence_length]."""

    tokens: Tensor
    targets: Tensor
    starts: Tensor | None
    """Index in its sequence of the first token of each token's document; None where targets say it
    (`document_starts`), or a sequence is one document."""


def _holds_out_none(one: SourceTokens, of: str) -> str:
    kind = "pair" if one.kind == PREFERENCES else "conversation"
    count = f"{one.documents:,} {kind}{'s' * (one.documents > 1)}"
    share = math.ceil(100 / one.documents) / 100
    more = f"{share} or more, " if share < 1 else ""
    return f"holds out none of {count}{of}; legal: {more}a larger corpus.source, or no evaluation"


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
        packing: Whether a sequence holds several conversations.

    Raises:
        PlanError: The text of a source is shorter than one sequence, or it has no conversation;
            names the field.
    """

    def __init__(
        self,
        corpus: TokenizedCorpus,
        sequence_length: int,
        global_batch: int,
        share: BatchShare,
        seed: int = 0,
        packing: bool = False,
    ) -> None:
        # A source without weight has no samples, and may be shorter than one.
        self.sources = [one for one in corpus.sources if one.weight > 0]
        self.sequence_length = sequence_length
        self.global_batch = global_batch
        self.seed = seed
        self.samples = np.array(share.samples())
        self.packing = packing
        self._sequences: dict[str, list[Sequences]] = {}
        separate = packing or any(one.boundaries is not None for one in self.sources)
        chats = any(one.conversations is not None for one in self.sources)
        self._with_starts = separate and chats
        self.train = self._order("train")
        self._holdout: SampleOrder | None = None
        self._last: tuple[int, Places] | None = None

    def sequences(self, part: str) -> list[Sequences]:
        """The sequences of each source; of its `train` or `holdout` part."""
        if part not in self._sequences:
            self._sequences[part] = [self._of_source(one, part) for one in self.sources]
        return self._sequences[part]

    def _of_source(self, one: SourceTokens, part: str) -> Sequences:
        what = "training" if part == "train" else "held-out"
        of = f" of {one.source}" if len(self.sources) > 1 else ""
        length = self.sequence_length
        if one.conversations is not None:
            found = ConversationSequences(one, part, length, self.packing, self.seed)
            if not found.report.conversations:
                raise refuse("corpus.holdout", _holds_out_none(one, of))
            if found.count < 1:
                raise refuse(
                    "training.sequence_length",
                    f"{length} leaves no answer of "
                    f"{found.report.conversations} {what} conversations{of}; take a larger "
                    "corpus.source, another corpus.holdout or longer sequences",
                )
            return found
        text = TextSequences(one, part, length)
        if text.count < 1:
            raise refuse(
                "training.sequence_length",
                f"{length} needs {length + 1} tokens, the {what} "
                f"text{of} has {len(text.text)}; take a larger corpus.source, another "
                "corpus.holdout or shorter sequences",
            )
        return text

    @property
    def together(self) -> int:
        """Samples that stand next to each other: 2 of preferences."""
        return self.sequences("train")[0].together

    def _order(self, part: str) -> SampleOrder:
        counts = [one.count // one.together for one in self.sequences(part)]
        return SampleOrder(counts, [one.weight for one in self.sources], self.seed)

    def contents(self, step: int) -> BatchContents:
        """What the batch of `step` is made of."""
        places = self._located(self.sample_index(step))
        return BatchContents(self._with_targets("train", places), places.source[self.samples])

    def evaluated_tokens(self, batch: int, source: int | None = None) -> int:
        """Tokens of an evaluation's `batch` that have a target, over all ranks."""
        samples = batch * self.global_batch + np.arange(self.global_batch)
        return int(self._with_targets("holdout", self._held_out(samples, source)).sum())

    def _with_targets(self, part: str, places: Places) -> np.ndarray:
        found = [
            one.trained(places.sequence[places.source == i])
            for i, one in enumerate(self.sequences(part))
        ]
        return np.array(found, np.int64)

    def sample_index(self, step: int) -> int:
        """Samples consumed before `step` over all ranks, which checkpoints record."""
        return step * self.global_batch

    def batch(self, step: int) -> Batch:
        """This rank's sequences of `step` (from 0)."""
        return self.take(self.sample_index(step))

    def take(self, sample: int) -> Batch:
        """This rank's part of the global batch from sample index `sample`, as `batch`."""
        places = self._located(sample)
        own = Places(places.source[self.samples], places.sequence[self.samples])
        return self._gather("train", own)

    def _located(self, sample: int) -> Places:
        """Where the samples of the global batch from `sample` are, of which one is remembered."""
        if self._last is None or self._last[0] != sample:
            samples = sample + np.arange(self.global_batch)
            found = self.train.locate(samples // self.together)
            self._last = sample, self._sides(samples, found)
        return self._last[1]

    def evaluation(self, batch: int, source: int | None = None) -> Batch:
        """The `batch`-th global batch of the held-out text, unshuffled.

        Held-out text that is too short wraps around.

        Args:
            batch: From 0.
            source: Index in `sources`; None: all of them by their weights.
        """
        samples = batch * self.global_batch + self.samples
        return self._gather("holdout", self._held_out(samples, source))

    def num_sequences(self, part: str) -> int:
        """Sequences of all sources; each has a number below it."""
        return sum(one.count for one in self.sequences(part))

    def step_numbers(self, step: int) -> np.ndarray:
        """Numbers of the training sequences of a step, over all ranks: [global_batch]."""
        return self._numbers("train", self._located(self.sample_index(step)))

    def evaluation_numbers(self, batch: int, source: int | None = None) -> np.ndarray:
        """Numbers of the held-out sequences of `evaluation`, over all ranks: [global_batch]."""
        samples = batch * self.global_batch + np.arange(self.global_batch)
        return self._numbers("holdout", self._held_out(samples, source))

    def numbered(self, part: str, numbers: np.ndarray) -> Batch:
        """This rank's sequences of a global batch of sequences, by their numbers."""
        own, first = numbers[self.samples], self._first_numbers(part)
        source = np.searchsorted(first, own, side="right") - 1
        return self._gather(part, Places(source, own - first[source]))

    def _numbers(self, part: str, places: Places) -> np.ndarray:
        found: np.ndarray = self._first_numbers(part)[places.source] + places.sequence
        return found

    def _first_numbers(self, part: str) -> np.ndarray:
        """Number of each source's first sequence."""
        return np.cumsum([0, *(one.count for one in self.sequences(part)[:-1])])

    def _held_out(self, samples: np.ndarray, source: int | None) -> Places:
        self._holdout = self._holdout or self._order("holdout")
        turns = samples // self.together
        if source is None:
            found = self._holdout.locate_unshuffled(turns)
        else:
            sequences = turns % self._holdout.sequences[source]
            found = Places(np.full_like(turns, source), sequences)
        return self._sides(samples, found)

    def _sides(self, samples: np.ndarray, found: Places) -> Places:
        """Sequences of samples, where those that stand together are found as one."""
        count = self.together
        return Places(found.source, found.sequence * count + samples % count)

    def _gather(self, part: str, places: Places) -> Batch:
        sources = self.sequences(part)
        found = [
            sources[source].sequence(sequence)
            for source, sequence in zip(places.source.flat, places.sequence.flat, strict=True)
        ]
        shape = *places.sequence.shape, self.sequence_length
        # torch.tensor copies into torch's own memory, where an allocator count sees it; from_numpy
        # would not.
        columns = zip(*found, strict=True)
        tokens, targets = (torch.tensor(np.stack(next(columns)).reshape(shape)) for _ in range(2))
        starts = torch.tensor(np.stack(next(columns)).reshape(shape)) if self._with_starts else None
        return Batch(tokens, targets, starts)
