"""Batches of conversations: packed without attention across them, or pairs side by side."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.test_loop import trained
from tests.parallel.small import GPT, LLAMA, plan
from tests.parallel.test_packed_documents import gradients, model_of
from workbench.corpora.tokenized_corpus import SourceTokens, TokenizedCorpus
from workbench.engine.data.batch_sampler import Batch, BatchSampler
from workbench.engine.data.conversation_sequences import ConversationSequences
from workbench.errors import PlanError
from workbench.models.seams import IGNORE_INDEX
from workbench.plan.stage_replicas import data_share

LENGTHS = [5, 3, 9, 2, 12, 4, 7, 2, 17, 3, 6, 8, 4, 5]
"""Tokens of each conversation; one is longer than a sequence of 12."""
LENGTH, TRAINED = 12, 10
"""Inputs per sequence, and how many of the conversations are trained on."""


def source(
    kind: str = "messages", lengths: list[int] = LENGTHS, weight: float = 1.0
) -> SourceTokens:
    """Distinct tokens, of which every third and a conversation's last have loss."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.arange(starts[-1], dtype=np.int32)
    loss = ids % 3 == 0
    loss[starts[1:] - 1] = True
    stored = np.where(loss, ids, ~ids)
    split = starts[min(TRAINED, len(lengths))]
    fields: dict[str, Any] = {"kind": kind, "conversations": starts}
    return SourceTokens("chats", stored[:split], stored[split:], weight, 14, 0, "", **fields)


def text(weight: float) -> SourceTokens:
    words = np.arange(200, 290, dtype=np.uint16)
    return SourceTokens(
        "text", words[:70], words[70:], weight, 9, 0, "", boundaries=np.array([0, 20, 21, 50, 80])
    )


def sampler(
    *sources: SourceTokens, rank: int = 0, ranks: int = 1, micro: int = 1, packing: bool = True
) -> BatchSampler:
    corpus = TokenizedCorpus(sources or (source(),), "bytes", None, 300)
    share = data_share(8, micro, rank, ranks)
    return BatchSampler(corpus, LENGTH, 8, share, seed=3, packing=packing)


def rows(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    assert batch.starts is not None
    return list(zip(*(each.reshape(-1, LENGTH).tolist() for each in batch), strict=True))


def seen(sequence: tuple[list[int], list[int], list[int]]) -> list[tuple[list[int], list[int]]]:
    """Inputs and targets of each document of a sequence."""
    tokens, targets, starts = sequence
    bounds = [*dict.fromkeys(starts), LENGTH]
    return [(tokens[a:b], targets[a:b]) for a, b in pairwise(bounds)]


def test_every_conversation_is_seen_once_with_its_targets() -> None:
    found = ConversationSequences(source(), "train", LENGTH, packing=True, seed=0)
    documents = [
        one
        for i in range(found.count)
        for one in seen(tuple(each.tolist() for each in found.sequence(i)))
        if set(one[1]) != {IGNORE_INDEX}
    ]
    starts = np.cumsum([0, *LENGTHS])[:TRAINED]
    expected = []
    for start, length in zip(starts.tolist(), LENGTHS):
        ids = list(range(start, start + length))[: LENGTH + 1]
        last = start + length - 1
        targets = [id if id % 3 == 0 or id == last else IGNORE_INDEX for id in ids[1:]]
        expected.append((ids[:-1], targets))
    assert sorted(documents) == expected
    assert found.report[:4] == (10, found.count, 1, 0)
    places = sum(min(n - 1, LENGTH) for n in LENGTHS[:TRAINED])
    assert found.report.filled == places / (found.count * LENGTH)
    assert found.count == -(-places // LENGTH)


def silent(lengths: list[int], until: int) -> SourceTokens:
    """Conversations of which no token before `until` has loss."""
    found = source(lengths=lengths)
    stored = found.train.copy()
    stored[:until] = np.minimum(stored[:until], ~stored[:until])
    fields: dict[str, Any] = {"kind": "messages", "conversations": found.conversations}
    return SourceTokens("silent", stored, stored[:0], 1.0, 2, 0, "", **fields)


def test_what_keeps_no_answer_is_left_out() -> None:
    found = ConversationSequences(silent([16, 5], 13), "train", LENGTH, packing=False, seed=0)
    assert found.report[:4] == (2, 1, 0, 1)
    assert found.sequence(0).tokens[0] == 16


def test_without_packing_a_sequence_is_one_conversation() -> None:
    found = sampler(packing=False).batch(0)
    assert found.starts is None
    for tokens, targets in zip(found.tokens.reshape(-1, LENGTH), found.targets.reshape(-1, LENGTH)):
        own = int((tokens > 0).sum() + (tokens[0] == 0))
        assert (tokens[:own].diff() == 1).all() and (targets[own:] == IGNORE_INDEX).all()
        assert own == LENGTH or int(targets[own - 1]) == int(tokens[own - 1]) + 1


@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["rope", "learned"])
def test_packed_conversations_equal_each_run_alone(shape: dict[str, Any]) -> None:
    changes = {"corpus.separate_documents": True, "training.sequence_length": LENGTH}
    model = model_of(plan(shape=shape, changes=changes).resolve(), "math")
    vocab = model.shape.vocab
    batch = sampler().batch(0)
    total = 0.0
    for sequence in rows(batch):
        for tokens, targets in seen(sequence):
            ids = torch.tensor([tokens]) % vocab
            own = torch.tensor([[t if t < 0 else t % vocab for t in targets]])
            loss = model(ids, own)
            loss.backward()
            total += loss.item()
    expected = gradients(model)
    assert batch.starts is not None
    model.samples.starts_of_step = batch.starts.transpose(0, 1)
    answers = batch.targets[:, 0]
    answers = torch.where(answers < 0, answers, answers % vocab)
    loss = model(batch.tokens[:, 0] % vocab, answers)
    loss.backward()
    assert loss.item() == pytest.approx(total, rel=1e-12)
    least = 1e-6 * max(float(each.abs().max()) for each in expected.values())
    for name, gradient in gradients(model).items():
        scale = max(float(expected[name].abs().max()), least)
        assert (gradient - expected[name]).abs().max() / scale <= 1e-10, name


@pytest.mark.parametrize("mixed", [False, True])
def test_ranks_together_are_one_device_and_count_their_targets(mixed: bool) -> None:
    sources = (source(weight=2.0), text(1.0)) if mixed else (source(),)
    one = sampler(*sources)
    for step in range(6):
        parts = [sampler(*sources, rank=rank, ranks=2, micro=2) for rank in range(2)]
        for part_of in ("batch", "evaluation"):
            found = [row for part in parts for row in rows(getattr(part, part_of)(step))]
            assert found == rows(getattr(one, part_of)(step))
        trained = sum(int((part.batch(step).targets != IGNORE_INDEX).sum()) for part in parts)
        assert trained == one.contents(step).trained_tokens.sum()
        held_out = one.evaluation(step).targets
        assert one.evaluated_tokens(step) == (held_out != IGNORE_INDEX).sum()


def test_text_beside_conversations_has_its_own_documents() -> None:
    texts = [row for row in rows(sampler(source(), text(1.0)).batch(0)) if row[0][-1] >= 200]
    assert texts
    for tokens, _, starts in texts:
        begins = [i for i, token in enumerate(tokens) if token - 200 in (20, 21, 50)]
        assert sorted(set(starts)) == sorted({0, *begins})


def test_a_run_goes_on_by_sample_index() -> None:
    share = data_share(4, 4)
    corpus = TokenizedCorpus((source(),), "bytes", None, 300)
    other = BatchSampler(corpus, LENGTH, 4, share, seed=3, packing=True)
    again = rows(other.take(sampler().sample_index(2))) + rows(other.take(20))
    assert again == rows(sampler().batch(2))


def test_pairs_stand_side_by_side_in_every_rank() -> None:
    pairs = source("preferences")
    for ranks in (1, 2):
        found = []
        for rank in range(ranks):
            batch = sampler(pairs, rank=rank, ranks=ranks, micro=2, packing=False).batch(1)
            assert batch.starts is None
            found += batch.tokens[..., 0].tolist()
        starts = np.cumsum([0, *LENGTHS]).tolist()
        assert all(starts.index(b) == starts.index(a) + 1 for a, b in found)
        # One of the five pairs is longer than a sequence; in one epoch every other is seen.
        assert {starts.index(a) for a, _ in found} == {0, 2, 4, 6}


def test_conversations_without_answers_are_refused() -> None:
    with pytest.raises(PlanError, match="12 leaves no answer of 2 training conversations"):
        sampler(silent([9, 5], 14))
    none = r"^corpus\.holdout: holds out none of 14 conversations; legal: 0\.08 or more, a larger"
    with pytest.raises(PlanError, match=none):
        sampler(source(lengths=[5])).evaluation(0)


def test_a_run_does_not_depend_on_how_conversations_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    chats = tmp_path / "chats.jsonl"
    with chats.open("w") as file:
        for i in range(12):
            said = [{**turn, "content": chr(65 + i) + turn["content"]} for turn in turns]
            file.write(json.dumps({"messages": said}) + "\n")
    found = []
    for packing, batch in ((True, 2), (False, 6)):
        changes: dict[str, Any] = {
            "corpus__packing": packing,
            "corpus__holdout": 0.5,
            "training__sequence_length": 70,
            "training__global_batch": batch,
            "training__evaluation": {"every": 1, "batches": 1},
            "training__steps": 1,
        }
        code, records = trained(tmp_path / str(packing), chats, **changes)
        assert code == 0
        (step,) = (one for one in records if one["kind"] == "step")
        (held_out,) = (one for one in records if one["kind"] == "evaluation")
        assert (step["tokens"], step["trained_tokens"]) == (70 * batch, 18)
        found.append([step["loss"], step["gradient_norm"], held_out["loss"]])
        words = [one["detail"] or "" for one in records if one["kind"] == "phase"]
        assert any(f"6 conversations in {batch} sequences" in each for each in words)
    assert found[0] == pytest.approx(found[1], rel=2e-5)
