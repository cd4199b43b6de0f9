"""Which sequence of which source each sample of a run is: a pure function of its index.

Nothing is stored, and neither mesh nor batch enters, so that a run resumes by sample index on any
mesh. The sources of a mixture take turns in blocks of `BLOCK` samples, in each of which every
source has a fixed number of places by its weight, in a pseudo-random order. The samples of one
source run through a pseudo-random permutation of its sequences, another one every epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ROUNDS = 6
BLOCK = 2**14
"""Samples among which the sources of a mixture have exact shares."""
_MIXING = 2**128
"""Keys of the order of sources lie above those of the order of sequences."""


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


class Places(NamedTuple):
    """Where samples are; both of the shape of the indices asked for."""

    source: np.ndarray
    sequence: np.ndarray


class SampleOrder:
    """Order of the samples of a run.

    Args:
        sequences: Sequences of each source, at least 1 where it has a weight.
        weights: Weight of each source; their sum is above 0.
        seed: Selects the permutations.
    """

    def __init__(self, sequences: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.sequences, self.seed = list(sequences), seed
        self.places = _places(weights)
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def locate(self, samples: np.ndarray) -> Places:
        """Source and sequence of each global sample index."""
        source, turn = self._turns(samples)
        sequence = np.empty_like(samples)
        for one in np.unique(source):
            here = source == one
            sequence[here] = self._sequence(int(one), turn[here])
        return Places(source, sequence)

    def locate_unshuffled(self, samples: np.ndarray) -> Places:
        """As `locate`, the sequences of each source in the order of its text, again and again."""
        source, turn = self._turns(samples)
        return Places(source, turn % np.array(self.sequences)[source])

    def _turns(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source of each sample, and how many samples of that source come before it."""
        if len(self.places) == 1:
            return np.zeros_like(samples), samples
        source, turn = np.empty_like(samples), np.empty_like(samples)
        blocks = samples // BLOCK
        for block in np.unique(blocks):
            here = blocks == block
            sources, turns = self._block(int(block))
            place = samples[here] % BLOCK
            source[here] = found = sources[place]
            turn[here] = block * self.places[found] + turns[place]
        return source, turn

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Source of each place of a block, and how many places of that source come before it."""
        if block not in self._blocks:
            key = _MIXING + self.seed * 2**32 + block
            mixed = permute(np.arange(BLOCK), BLOCK, key)
            sources = np.searchsorted(np.cumsum(self.places), mixed, side="right")
            turns = np.empty_like(sources)
            for one, count in enumerate(self.places):
                turns[sources == one] = np.arange(count)
            if len(self._blocks) > 1:  # a batch may reach into the next block
                self._blocks.pop(next(iter(self._blocks)))
            self._blocks[block] = sources, turns
        return self._blocks[block]

    def _sequence(self, source: int, turn: np.ndarray) -> np.ndarray:
        count = self.sequences[source]
        epochs = turn // count
        sequence = np.empty_like(turn)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            key = source * 2**96 + self.seed * 2**32 + int(epoch)
            sequence[here] = permute(turn[here] % count, count, key)
        return sequence


def _places(weights: Sequence[float]) -> np.ndarray:
    """int64: places of each source in a block, by largest remainder; none without a weight."""
    exact = np.array(weights, float) / sum(weights) * BLOCK
    places = np.maximum(np.floor(exact), exact > 0).astype(np.int64)
    left = BLOCK - int(places.sum())
    if left > 0:
        places[np.argsort(places - exact, kind="stable")[:left]] += 1
    else:  # sources below one place in a block took theirs from the largest
        places[np.argmax(places)] += left
    result: np.ndarray = places
    return result
