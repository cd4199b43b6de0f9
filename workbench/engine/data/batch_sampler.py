"""Deterministic sampling of batches, which resumes by sample index on any mesh.

Training text is cut into sequences of `sequence_length` inputs (and one more token, the last
target). Sample g of the run is element g mod n of a pseudo-random permutation of the n sequences,
with another permutation every epoch. A step takes the next `global_batch` samples, of which each
rank takes its share (`plan.stage_replicas`): all data coordinates, or all replicas of a stage, have
together the batch of one device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.engine.data.tokenized_corpus import Tokens
    from workbench.plan.stage_replicas import BatchShare

ROUNDS = 6


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Images of `index` under a pseudo-random permutation of range(size), without storing it.

    A Feistel network on the smallest even number of bits that holds `size`, applied again to images
    outside the range (cycle walking; Black and Rogaway 2002).

    Args:
        index: Integers below `size`.
        size: Size of the permutation.
        key: Selects the permutation.

    Returns:
        int64, of the shape of `index`.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    value = _feistel(index.astype(np.uint64), half, mask, keys)
    while (outside := value >= size).any():
        value[outside] = _feistel(value[outside], half, mask, keys)
    return value.astype(np.int64)


def _feistel(value: np.ndarray, half: np.uint64, mask: np.uint64, keys: np.ndarray) -> np.ndarray:
    left, right = value >> half, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << half) | right


def _mix(value: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele et al. 2014): every output bit depends on every input bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = value ^ (value >> np.uint64(31))
    return mixed


class BatchSampler:
    """Batches of one rank.

    Args:
        tokens: As `tokenized_corpus.load` returns them.
        sequence_length: Inputs per sequence.
        global_batch: Sequences per step, over all ranks.
        share: Which of them are this rank's, by microbatch.
        seed: Selects the permutations.

    Raises:
        ValueError: The text is shorter than one sequence; names the field.
    """

    def __init__(
        self,
        tokens: Tokens,
        sequence_length: int,
        global_batch: int,
        share: BatchShare,
        seed: int = 0,
    ) -> None:
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.global_batch = global_batch
        self.seed = seed
        self.samples = np.array(share.samples())
        self.num_sequences = self._sequences(tokens.train, "training text")

    def _sequences(self, text: np.ndarray, what: str) -> int:
        count = (len(text) - 1) // self.sequence_length
        if count < 1:
            raise ValueError(
                f"training.sequence_length: {self.sequence_length} needs "
                f"{self.sequence_length + 1} tokens, the {what} "
                f"has {len(text)}; take a larger corpus.source, another corpus.holdout or shorter "
                f"sequences"
            )
        return count

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
        return self._gather(self.tokens.train, self.order(sample + self.samples))

    def order(self, samples: np.ndarray) -> np.ndarray:
        """Sequence number of each global sample index."""
        epochs = samples // self.num_sequences
        order = np.empty_like(samples)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            order[here] = permute(
                samples[here] % self.num_sequences,
                self.num_sequences,
                self.seed * 2**32 + int(epoch),
            )
        return order

    def evaluation(self, batch: int) -> tuple[Tensor, Tensor]:
        """The `batch`-th global batch of the held-out text, unshuffled; shapes as in `batch`.

        Held-out text that is too short wraps around.
        """
        count = self._sequences(self.tokens.holdout, "held-out text")
        samples = batch * self.global_batch + self.samples
        return self._gather(self.tokens.holdout, samples % count)

    def _gather(self, text: np.ndarray, sequences: np.ndarray) -> tuple[Tensor, Tensor]:
        length = self.sequence_length
        flat = [text[s * length : s * length + length + 1] for s in sequences.flat]
        rows = np.stack(flat).astype(np.int64).reshape(*sequences.shape, length + 1)
        # torch.tensor copies into torch's own memory, where an allocator count sees it; from_numpy
        # would not.
        return torch.tensor(rows[..., :-1]), torch.tensor(rows[..., 1:])
