"""Sequences of running text: windows of `sequence_length` inputs, over the ends of documents.

Where documents are separated the last token of each has no target
(`models/attention/packed_documents.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.models.seams import IGNORE_INDEX

if TYPE_CHECKING:
    from workbench.corpora.tokenized_corpus import SourceTokens


class Sequence(NamedTuple):
    """One sequence; each int64 [sequence_length]."""

    tokens: np.ndarray
    targets: np.ndarray
    starts: np.ndarray
    """Index of the first token of each token's document."""


class TextSequences:
    """The sequences of one source of text.

    Args:
        one: Its tokens.
        part: `train` or `holdout`.
        length: Inputs per sequence.

    Attributes:
        count: How many there are.
    """

    together = 1
    """Sequences that stand next to each other in a batch."""

    def __init__(self, one: SourceTokens, part: str, length: int) -> None:
        self.text: np.ndarray = getattr(one, part)
        self.boundaries, self.length = one.boundaries, length
        self.first = len(one.train) if part == "holdout" else 0
        self.count = max(0, (len(self.text) - 1) // length)

    def trained(self, sequences: np.ndarray) -> int:
        """Tokens of `sequences` that have a target."""
        first, stop = self._ends(sequences)
        return int(len(sequences) * self.length - (stop - first).sum())

    def sequence(self, index: int) -> Sequence:
        """Sequence `index`, from 0."""
        start = index * self.length
        row = self.text[start : start + self.length + 1].astype(np.int64)
        targets, starts = row[1:].copy(), np.zeros(self.length, np.int64)
        if self.boundaries is not None:
            (first,), (stop,) = self._ends(np.array([index]))
            begins = self.boundaries[first:stop] - start - self.first
            targets[begins - 1] = IGNORE_INDEX
            begins = begins[begins < self.length]
            starts[begins] = begins
        return Sequence(row[:-1], targets, np.maximum.accumulate(starts))

    def _ends(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the boundaries the first and the one after the last that is a target of each of
        `sequences`; no such boundaries where documents are not separated.
        """
        if self.boundaries is None:
            return np.zeros_like(sequences), np.zeros_like(sequences)
        start = sequences * self.length + self.first
        within = start, start + self.length
        first, stop = (np.searchsorted(self.boundaries, at, side="right") for at in within)
        return first, stop
