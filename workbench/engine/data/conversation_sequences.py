"""Sequences of conversations, as `PackedConversations` puts them together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.corpora.conversations.packed_conversations import PackedConversations
from workbench.engine.data.text_sequences import Sequence
from workbench.models.seams import IGNORE_INDEX

if TYPE_CHECKING:
    from workbench.corpora.tokenized_corpus import SourceTokens


class ConversationSequences(PackedConversations):
    """The sequences of one source of conversations, with their tokens; arguments as there."""

    def __init__(self, one: SourceTokens, part: str, length: int, packing: bool, seed: int) -> None:
        super().__init__(one, part, length, packing, seed)
        self.text: np.ndarray = getattr(one, part)
        self.length = length

    def sequence(self, index: int) -> Sequence:
        """Sequence `index`, from 0; places that no conversation fills have no target, and are a
        document of their own.
        """
        tokens, targets = np.zeros((2, self.length), np.int64)
        targets += IGNORE_INDEX
        starts, at = np.zeros(self.length, np.int64), 0
        for item in self.items(index):
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
