"""Mixtures keep their weights, cover each source once an epoch, and do not depend on the mesh."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.corpora.sample_order import BLOCK, SampleOrder
from workbench.corpora.tokenized_corpus import SourceTokens, TokenizedCorpus
from workbench.engine.data.batch_sampler import BatchSampler
from workbench.plan.stage_replicas import data_share

WEIGHTS = st.lists(st.floats(0, 1e6), min_size=1, max_size=6).filter(lambda w: sum(w) > 0)


@given(WEIGHTS, st.integers(0, 2**31))
def test_every_block_has_each_source_by_its_weight(weights: list[float], seed: int) -> None:
    order = SampleOrder([10**9] * len(weights), weights, seed)
    source, _ = order.locate(np.arange(BLOCK, 2 * BLOCK))
    counts = np.bincount(source, minlength=len(weights))
    shares = np.array(weights) / sum(weights)
    assert np.abs(counts / BLOCK - shares).max() <= len(weights) / BLOCK
    assert all((count > 0) == (share > 0) for count, share in zip(counts, shares))


def test_an_epoch_of_a_source_has_every_sequence_once() -> None:
    order = SampleOrder([700, 90], [3, 1], seed=5)
    source, sequence = order.locate(np.arange(BLOCK + 5000))
    for one, count in enumerate(order.sequences):
        turns = sequence[source == one]
        epochs = len(turns) // count
        assert epochs > 20
        for epoch in turns[: epochs * count].reshape(epochs, count):
            assert sorted(epoch.tolist()) == list(range(count))
        assert turns[:count].tolist() != turns[count : 2 * count].tolist()


def test_order_is_a_function_of_the_index_alone() -> None:
    order = SampleOrder([50, 60, 70], [1, 2, 3], seed=9)
    together = order.locate(np.arange(BLOCK - 300, BLOCK + 300))
    for at in (0, 299, 300, 599):
        alone = order.locate(np.array([BLOCK - 300 + at]))
        assert (alone.source[0], alone.sequence[0]) == (together.source[at], together.sequence[at])


def test_a_mixture_goes_on_by_sample_index_on_another_mesh() -> None:
    """Two data-parallel ranks, then four with another micro-batch, read what one reads
    throughout.
    """
    texts = [np.arange(k, k + 2000, dtype=np.uint16) for k in (0, 10_000, 20_000)]
    sources = [
        SourceTokens(str(i), text, text[:200], weight, 1, 0, "")
        for i, (text, weight) in enumerate(zip(texts, (0.6, 0.0, 0.4)))
    ]
    corpus = TokenizedCorpus(tuple(sources), "bytes", None, 30_000)

    def read(ranks: int, micro: int, steps: range) -> torch.Tensor:
        parts = [
            BatchSampler(corpus, 8, 24, data_share(24, micro, rank, ranks), seed=4)
            for rank in range(ranks)
        ]
        rows = [torch.cat([part.batch(step)[0].reshape(-1, 8) for part in parts]) for step in steps]
        return torch.cat(rows)

    throughout = read(1, 24, range(12))
    assert torch.equal(torch.cat([read(2, 3, range(5)), read(4, 2, range(5, 12))]), throughout)
    from_source = torch.bincount(throughout[:, 0] // 10_000, minlength=3).tolist()
    assert from_source[1] == 0 and min(from_source[0], from_source[2]) > 60
    one = BatchSampler(corpus, 8, 24, data_share(24, 24), seed=4)
    assert (one.evaluation(1, source=1)[0] // 10_000).unique().tolist() == [2]
    held = one.evaluation(0)[0]
    assert {0, 2} == set((held[0, :, 0] // 10_000).tolist())


def test_a_source_that_is_too_short_is_named() -> None:
    text = np.arange(100, dtype=np.uint16)
    sources = [SourceTokens(n, text[:k], text[:0], 1.0, 1, 0, "") for n, k in (("a", 99), ("b", 5))]
    corpus = TokenizedCorpus(tuple(sources), "bytes", None, 256)
    with pytest.raises(ValueError, match="needs 9 tokens, the training text of b has 5"):
        BatchSampler(corpus, 8, 4, data_share(4, 4))
