"""Sequences of conversations: packed, one each, or the two of a preference pair.

A conversation of n tokens takes n - 1 places: its last token is a target only. One that is longer
than a sequence is cut; without a target in what is left it is left out, as is a preference pair of
which one is longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.corpora.conversations.best_fit_packing import pack_best_fit
from workbench.engine.data.text_sequences import Sequence
from workbench.models.seams import IGNORE_INDEX
from workbench.runtime_facts.conversation_fields import PREFERENCES

if TYPE_CHECKING:
    from workbench.corpora.tokenized_corpus import SourceTokens

CHUNK = 2**24
"""Tokens that are looked at together."""


class Packed(NamedTuple):
    """What became of the conversations of a source."""

    conversations: int
    sequences: int
    cut: int
    left_out: int
    filled: float
    """Share of the places that hold a token."""


class ConversationSequences:
    """The sequences of one source of conversations.

    Args:
        one: Its tokens.
        part: `train` or `holdout`.
        length: Inputs per sequence.
        packing: Whether a sequence holds several conversations.
        seed: Decides which of equal length share one.

    Attributes:
        count: How many sequences there are.
        packed: What became of the conversations.
    """

    def __init__(self, one: SourceTokens, part: str, length: int, packing: bool, seed: int) -> None:
        assert one.conversations is not None
        self.text: np.ndarray = getattr(one, part)
        self.length = length
        first = len(one.train) if part == "holdout" else 0
        within = (one.conversations >= first) & (one.conversations <= first + len(self.text))
        self.starts = one.conversations[within] - first
        self.together = 2 if one.kind == PREFERENCES else 1
        sizes = np.diff(self.starts)
        places = np.minimum(sizes - 1, length)
        self.targets = self._targets(places)
        kept = self.targets > 0
        if self.together == 2:
            kept &= sizes <= length + 1
            kept = np.repeat(kept.reshape(-1, 2).all(1), 2)
        chosen = np.flatnonzero(kept)
        self.items, self.bins = chosen, np.arange(len(chosen) + 1)
        if packing and len(chosen):
            items, self.bins = pack_best_fit(places[chosen], length, seed)
            self.items = chosen[items]
        self.count = len(self.bins) - 1
        self.packed = Packed(
            len(sizes),
            self.count,
            int((kept & (sizes > length + 1)).sum()),
            int((~kept).sum()),
            float(places[chosen].sum() / max(1, self.count * length)),
        )

    def trained(self, sequences: np.ndarray) -> int:
        """Tokens of `sequences` that have a target."""
        return sum(int(self.targets[self._items(index)].sum()) for index in sequences)

    def sequence(self, index: int) -> Sequence:
        """Sequence `index`, from 0; places that no conversation fills have no target, and are a
        document of their own.
        """
        tokens, targets = np.zeros((2, self.length), np.int64)
        targets += IGNORE_INDEX
        starts, at = np.zeros(self.length, np.int64), 0
        for item in self._items(index):
            begin, end = self.starts[item : item + 2]
            row = self.text[begin : min(end, begin + self.length + 1)]
            ids = np.where(row < 0, ~row, row)
            here = slice(at, at + len(ids) - 1)
            tokens[here] = ids[:-1]
            targets[here] = np.where(row < 0, IGNORE_INDEX, ids)[1:]
            starts[here] = at
            at = here.stop
        starts[at:] = at
        return Sequence(tokens, targets, starts)

    def _items(self, index: int) -> np.ndarray:
        return self.items[self.bins[index] : self.bins[index + 1]]

    def _targets(self, places: np.ndarray) -> np.ndarray:
        """Targets of each conversation, cut to its places; reads all tokens once."""
        found = np.zeros(len(places), np.int64)
        first = 0
        while first < len(places):
            stop = int(np.searchsorted(self.starts, self.starts[first] + CHUNK, side="right")) - 1
            stop = min(max(stop, first + 1), len(places))
            begin = self.starts[first]
            has = np.concatenate([[0], np.cumsum(self.text[begin : self.starts[stop]] >= 0)])
            own = self.starts[first:stop] - begin + 1
            found[first:stop] = has[own + places[first:stop]] - has[own]
            first = stop
        return found
