"""A byte-level BPE trained on the corpus, which has no out-of-vocabulary text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from workbench.corpora.conversations.chat_encoder import chat_texts
from workbench.corpora.documents import decoded, documents
from workbench.corpora.pieces import pieces
from workbench.plan.corpus_files import SourceFiles
from workbench.runtime_facts.conversation_fields import FIELDS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|end|>"
"""End-of-text token: token 0."""
TRAIN_BYTES = 16 * 2**20
"""Text that a BPE is trained on, sampled evenly over the pieces."""


def sample_texts(sources: list[SourceFiles]) -> Iterator[str]:
    """Texts of every n-th piece, about `TRAIN_BYTES` in all."""
    found = [(one, piece) for one in sources for piece in pieces(one)]
    total = sum(piece.size for _, piece in found)
    for source, piece in found[:: max(1, round(total / TRAIN_BYTES))]:
        if source.format in FIELDS:
            yield from chat_texts(piece, source.format)
            continue
        for batch in documents(piece, source.column):
            for text in batch:
                yield decoded(text, piece)


def train_bpe(texts: Iterator[str], size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `size` tokens; deterministic."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
