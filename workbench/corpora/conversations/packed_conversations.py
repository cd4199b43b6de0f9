"""Which conversations share a sequence: packed, one each, or the two of a preference pair.

A conversation of n tokens takes n - 1 places: its last token is a target only. One that is longer
than a sequence is cut; without a target in what is left it is left out, as is a preference pair of
which one is longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.corpora.conversations.best_fit_packing import pack_best_fit
from workbench.runtime_facts.conversation_fields import PREFERENCES

if TYPE_CHECKING:
    from workbench.corpora.tokenized_corpus import SourceTokens

CHUNK = 2**24
"""Tokens that are looked at together."""


class PackingReport(NamedTuple):
    """What became of the conversations of a source."""

    conversations: int
    sequences: int
    cut: int
    left_out: int
    filled: float
    """Share of the places that hold a token."""

    def __str__(self) -> str:
        return (
            f"{self.conversations:,} conversations in {self.sequences:,} sequences, "
            f"{self.filled:.1%} filled; {self.cut:,} cut, {self.left_out:,} left out"
        )


class PackedConversations:
    """The sequences of one source of conversations, as which conversations each holds.

    Args:
        one: Its tokens.
        part: `train` or `holdout`.
        length: Inputs per sequence.
        packing: Whether a sequence holds several conversations.
        seed: Decides which of equal length share one.

    Attributes:
        starts: int64 [conversations + 1]: the first token of each, and the number of tokens.
        count: How many sequences there are.
        together: Sequences that stand next to each other in a batch: 2 of preferences.
        report: What became of the conversations.
    """

    def __init__(self, one: SourceTokens, part: str, length: int, packing: bool, seed: int) -> None:
        assert one.conversations is not None
        text: np.ndarray = getattr(one, part)
        first = len(one.train) if part == "holdout" else 0
        within = (one.conversations >= first) & (one.conversations <= first + len(text))
        self.starts: np.ndarray = one.conversations[within] - first
        self.together = 2 if one.kind == PREFERENCES else 1
        sizes = np.diff(self.starts)
        places = np.minimum(sizes - 1, length)
        self._targets = _num_targets(text, self.starts, places)
        kept = self._targets > 0
        if self.together == 2:
            kept &= sizes <= length + 1
            kept = np.repeat(kept.reshape(-1, 2).all(1), 2)
        chosen = np.flatnonzero(kept)
        self._items, self._bins = chosen, np.arange(len(chosen) + 1)
        if packing and len(chosen):
            items, self._bins = pack_best_fit(places[chosen], length, seed)
            self._items = chosen[items]
        self.count = len(self._bins) - 1
        self.report = PackingReport(
            len(sizes),
            self.count,
            int((kept & (sizes > length + 1)).sum()),
            int((~kept).sum()),
            float(places[chosen].sum() / max(1, self.count * length)),
        )

    def items(self, sequence: int) -> np.ndarray:
        """Conversations of a sequence, in their order."""
        return self._items[self._bins[sequence] : self._bins[sequence + 1]]

    def trained(self, sequences: np.ndarray) -> int:
        """Tokens of `sequences` that have a target."""
        return sum(int(self._targets[self.items(index)].sum()) for index in sequences)


def _num_targets(text: np.ndarray, starts: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Targets of each conversation, cut to its places; reads all tokens once."""
    found = np.zeros(len(places), np.int64)
    first = 0
    while first < len(places):
        stop = int(np.searchsorted(starts, starts[first] + CHUNK, side="right")) - 1
        stop = min(max(stop, first + 1), len(places))
        begin = starts[first]
        has = np.concatenate([[0], np.cumsum(text[begin : starts[stop]] >= 0)])
        own = starts[first:stop] - begin + 1
        found[first:stop] = has[own + places[first:stop]] - has[own]
        first = stop
    return found
