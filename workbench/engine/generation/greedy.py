"""Greedy generation through the key-value cache, on tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from workbench.engine.generation.loaded_model import only_stage
from workbench.engine.generation.logits_head import LogitsHead
from workbench.engine.session import Session
from workbench.models.attention.kv_cache import KvCache


def generate_greedily(
    session: Session,
    prompt: Sequence[int],
    most: int,
    ends: Collection[int] = (),
    on_token: Callable[[int], None] = lambda token: None,
) -> list[int]:
    """Tokens that follow a prompt, each the most probable one; called by all ranks together.

    The session's model is changed: its attention has a cache, its head gives logits.

    Args:
        session: The model, without pipeline stages; its plan's sequence length is the cache's.
        prompt: Token ids.
        most: Number of tokens to generate.
        ends: Tokens after any of which generation ends; it is the last one.
        on_token: Called with each token.

    Raises:
        ValueError: Prompt and tokens do not fit the sequence length.
    """
    capacity = session.plan.training.sequence_length
    if len(prompt) + most > capacity:
        raise ValueError(
            f"{len(prompt)} tokens of the prompt and {most} to generate are more than the "
            f"{capacity} of a sequence"
        )
    model = only_stage(session)
    assert model.head is not None
    cache = KvCache(model, capacity)
    model.head = LogitsHead(model.head, model.shape.vocab, last=1)  # type: ignore[assignment]
    given, found = torch.tensor([list(prompt)]), list[int]()
    with torch.no_grad():
        while len(found) < most and (not found or found[-1] not in ends):
            logits_B1V = model(given, given)
            cache.advance(given.shape[1])
            found.append(int(logits_B1V[0, -1].argmax()))
            on_token(found[-1])
            given = torch.tensor([found[-1:]])
    return found
