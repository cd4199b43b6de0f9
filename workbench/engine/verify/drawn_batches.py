"""Batches for a verification: random tokens, with targets and documents as a run of the plan has
them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from workbench.engine.data.batch_sampler import Batch
from workbench.engine.verify.paired_answers import pair_up
from workbench.models.seams import IGNORE_INDEX
from workbench.plan.corpus_files import conversation_format
from workbench.plan.resolved_plan import ResolvedPlan

NUM_STEPS = 3
DOCUMENTS, TURNS = 4, 8
"""About how many documents, and changes from prompt to answer and back, a sequence has."""


def random_batches(plan: ResolvedPlan) -> Iterator[Batch]:
    """`NUM_STEPS` batches [global_batch, sequence_length] of random tokens over the vocabulary,
    contiguous as those of a run: a user's loss may `view` them.

    Of conversations answers alone have a target, in turns, and the ends of sequences are empty; of
    preferences answers of different lengths; of other text a document's last token has none.

    Args:
        plan: The plan as it is verified.
    """
    t = plan.training
    generator = torch.Generator().manual_seed(t.seed)
    pairs = plan.finetune is not None and plan.finetune.preference is not None
    chats = not pairs and conversation_format(plan.corpus) is not None
    for _ in range(NUM_STEPS):
        shape = t.global_batch, t.sequence_length + 1
        text = torch.randint(plan.vocab, shape, generator=generator)
        tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        starts = None
        separate = plan.corpus.separate_documents
        if chats:
            starts = _conversations(tokens, targets, separate, plan.corpus.loss_on, generator)
        elif separate:
            targets[_ends(targets, generator)] = IGNORE_INDEX
        if pairs:
            pair_up(tokens, targets, generator)
        yield Batch(tokens, targets, starts)


def _ends(targets_ST: Tensor, generator: torch.Generator) -> Tensor:
    """Where documents end [sequences, T]: a few a sequence, the first of one token."""
    ends = torch.rand(targets_ST.shape, generator=generator) < DOCUMENTS / targets_ST.shape[1]
    ends[0, 0] = True
    return ends


def _conversations(
    tokens_ST: Tensor,
    targets_ST: Tensor,
    separate: bool,
    loss_on: str | None,
    generator: torch.Generator,
) -> Tensor | None:
    """Make random text [sequences, T] conversations, in place, as `ConversationSequences` puts them
    together; the start of each token's, where several share a sequence.
    """
    sequences, length = targets_ST.shape
    places = torch.arange(length)
    begins = torch.zeros_like(targets_ST, dtype=torch.bool)
    if separate:
        begins[:, 1:] = _ends(targets_ST, generator)[:, :-1]
    starts = begins.mul(places).cummax(1).values
    turns = torch.rand(targets_ST.shape, generator=generator).lt(TURNS / length).cumsum(1)
    answers = (turns - turns.gather(1, starts)) % 2 == 1
    answers[-1, 0] = True  # a batch without a target would verify nothing
    used = torch.randint(length - length // 4, length + 1, (sequences, 1), generator=generator)
    empty = places >= used
    targets_ST[empty if loss_on == "all" else empty | ~answers] = IGNORE_INDEX
    tokens_ST[empty] = 0
    return torch.where(empty, used, starts) if separate else None
