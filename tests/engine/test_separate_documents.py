"""Batches of packed documents: the last token of each has no target, and is not counted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.corpora.written_sources import (
    DOCUMENTS,
    byte_tokens,
    write_jsonl,
    write_megatron,
    write_tokenizer,
)
from workbench.corpora.tokenized_corpus import SourceTokens, TokenizedCorpus, load_corpus
from workbench.engine.data.batch_sampler import BatchSampler
from workbench.errors import PlanError
from workbench.models.seams import IGNORE_INDEX
from workbench.plan import schema
from workbench.plan.stage_replicas import data_share

BOUNDARIES = np.array([0, 3, 4, 20, 21, 50, 79, 80, 81, 95, 118])


def corpus(*weights: float, boundaries: np.ndarray | None = BOUNDARIES) -> TokenizedCorpus:
    """Tokens 0 to 120, of which 80 train."""
    text = np.arange(121, dtype=np.uint16)
    sources = tuple(
        SourceTokens(str(i), text[:81], text[81:], weight, 9, 0, "", boundaries=boundaries)
        for i, weight in enumerate(weights or (1.0,))
    )
    return TokenizedCorpus(sources, "bytes", None, 1000)


def sampler(of: TokenizedCorpus, rank: int = 0, ranks: int = 1) -> BatchSampler:
    return BatchSampler(of, 10, 4, data_share(4, 1, rank, ranks), seed=1)


@pytest.mark.parametrize("part", ["batch", "evaluation"])
def test_the_last_token_of_a_document_has_no_target(part: str) -> None:
    inputs, targets, _ = getattr(sampler(corpus()), part)(0)
    ends = np.isin(inputs + 1, BOUNDARIES)
    assert ends.any()
    assert not ends.all()
    assert torch.equal(targets, torch.where(torch.tensor(ends), IGNORE_INDEX, inputs + 1))


@pytest.mark.parametrize("weights", [(1.0,), (2.0, 1.0)])
def test_trained_tokens_are_counted_over_all_ranks(weights: tuple[float, ...]) -> None:
    for step in range(5):
        parts = [sampler(corpus(*weights), rank, 2) for rank in range(2)]
        counted = sum(int((one.batch(step)[1] != IGNORE_INDEX).sum()) for one in parts)
        assert counted == parts[0].contents(step).trained_tokens.sum() < 40
        held_out = sum(int((one.evaluation(step)[1] != IGNORE_INDEX).sum()) for one in parts)
        assert held_out == parts[0].evaluated_tokens(step)
    assert sampler(corpus(*weights, boundaries=None)).contents(0).trained_tokens.sum() == 40


def load(tmp_path: Path, source: Path, **fields: Any) -> SourceTokens:
    setting = schema.Corpus(source=str(source), separate_documents=True, holdout=0, **fields)
    return load_corpus(setting, 300, folder=tmp_path / "cache").sources[0]


def begins(found: SourceTokens) -> list[int]:
    assert found.boundaries is not None
    return [int(i) for i in found.boundaries]


def test_boundaries_come_from_rows_and_from_an_index(tmp_path: Path) -> None:
    rows = load(tmp_path, write_jsonl(tmp_path / "a.jsonl", DOCUMENTS))
    ends = np.flatnonzero(np.array(byte_tokens(DOCUMENTS)) == 0)[:-1] + 1
    assert begins(rows) == [0, *ends]
    index = load(tmp_path, write_megatron(tmp_path / "b", [[5, 6], [7], [8, 9, 10]]))
    assert begins(index) == [0, 2, 3]


def test_boundaries_of_bare_tokens_follow_the_end_of_text(tmp_path: Path) -> None:
    source = tmp_path / "tokens.npy"
    np.save(source, np.array([4, 0, 5, 6, 0, 0, 7, 0], np.uint16))
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    assert begins(load(tmp_path, source, tokenizer=str(tokenizer))) == [0, 2, 5, 6]
    with pytest.raises(PlanError, match=r"tokens\.npy does not say where documents end; legal"):
        load(tmp_path, source)


def test_documents_of_one_token_have_nothing_to_train_on(tmp_path: Path) -> None:
    source = write_megatron(tmp_path / "c", [[5], [6], [7]])
    with pytest.raises(PlanError, match=r"all 3 documents of .*c\S* have one token"):
        load(tmp_path, source)
