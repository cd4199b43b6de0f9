"""Conversations, of which answers alone have loss, train under every axis as on one device; and
what a verification draws of them has the form of a run's batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.small import GPT, plan
from tests.parallel.test_context import context_plan
from tests.parallel.test_equality import assert_equal_to_one_device
from tests.parallel.test_mutations import failure_of
from workbench.engine import session as session_module
from workbench.engine.session import Session
from workbench.engine.verify.drawn_batches import random_batches
from workbench.engine.verify.equivalence import verify
from workbench.models.attention.packed_documents import document_starts
from workbench.models.seams import IGNORE_INDEX
from workbench.parallel.context.apply_context import local_tokens
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

CHATS: dict[str, Any] = {"corpus.format": "messages", "finetune.lora": {"rank": 3}}
ALONE = {**CHATS, "corpus.packing": False}


def drawn(**changes: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    return next(random_batches(plan(changes={**CHATS, **changes}).resolve()))


def test_answers_of_packed_conversations_are_drawn_as_a_run_packs_them() -> None:
    tokens, targets, starts = drawn()
    assert starts is not None
    places = torch.arange(targets.shape[1])
    assert (starts.gather(1, starts) == starts).all() and (starts <= places).all()
    answers = targets != IGNORE_INDEX
    assert 0.2 < answers.float().mean() < 0.8
    first = starts == places
    # A conversation begins with a prompt, so that documents are not where targets say.
    assert int(answers[first].sum()) <= 1 and not torch.equal(starts, document_starts(targets))
    assert (first.sum(1) > 1).any() and ((starts > 0) & answers).any()
    empty = (tokens == 0) & (starts == starts[:, -1:])
    assert (empty[:, -1]).any() and not (answers & empty).any()


def test_conversations_alone_have_no_starts_and_all_tokens_may_have_loss() -> None:
    tokens, targets, starts = drawn(**{"corpus.packing": False, "corpus.loss_on": "all"})
    assert starts is None
    ignored = targets == IGNORE_INDEX
    assert (ignored.int().diff() >= 0).all() and 0 < ignored.float().mean() < 0.25
    assert (tokens[ignored] == 0).all()


AXES: dict[str, Callable[[], Plan]] = {
    "zero-3": lambda: plan(data=2, shape=GPT, changes={**CHATS, "strategy.data.zero": 3}),
    "sequence": lambda: plan(2, changes={**CHATS, "strategy.tensor.sequence": True}),
    "pipeline": lambda: plan(1, 2, shape=GPT, changes=CHATS),
    "ring": lambda: context_plan(2, "ring", changes=CHATS),
    "ulysses": lambda: context_plan(2, "ulysses", changes=ALONE),
}


@pytest.mark.parametrize("axis", AXES)
def test_answers_equal_one_device(axis: str) -> None:
    assert_equal_to_one_device(verify(AXES[axis](), "fp64"))


def test_a_rank_that_takes_documents_from_targets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Session._find_documents
    monkeypatch.setattr(
        Session, "_find_documents", lambda session, targets, starts: found(session, targets, None)
    )
    failure_of(verify(AXES["zero-3"]()))


def test_a_mask_of_other_places_of_a_ring_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def contiguous(tokens: Tensor, targets: Tensor, ring: Any, ulysses: Any) -> Any:
        taken, theirs = local_tokens(tokens, targets.clamp(min=0), ring, ulysses)
        mask = targets.chunk(ring.size, -1)[ring.index] == IGNORE_INDEX
        return taken, theirs.masked_fill(mask, IGNORE_INDEX)

    monkeypatch.setattr(session_module, "local_tokens", contiguous)
    text: ResolvedPlan = context_plan(2, "ring").resolve()
    assert_equal_to_one_device(verify(text))  # without answers nothing is masked
    failure_of(verify(context_plan(2, "ring", changes=ALONE)))
