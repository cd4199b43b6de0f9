"""The union of all ranks is one device's batch, in its order; every epoch sees every sequence
once.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.corpora.sample_order import permute
from workbench.corpora.tokenized_corpus import SourceTokens, TokenizedCorpus
from workbench.engine.data.batch_sampler import BatchSampler
from workbench.plan.stage_replicas import data_share


def tokens(train: int = 1000, holdout: int = 200) -> TokenizedCorpus:
    texts = np.arange(train, dtype=np.uint16), np.arange(holdout, dtype=np.uint16)
    return TokenizedCorpus((SourceTokens("text", *texts, 1.0, 1, 0, ""),), "bytes", None, 1000)


def order(sampler: BatchSampler, samples: np.ndarray) -> np.ndarray:
    return sampler.train.locate(samples).sequence


@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_permutation_is_one(size: int, key: int) -> None:
    image = permute(np.arange(size), size, key)
    assert sorted(image.tolist()) == list(range(size))


def test_permutation_mixes() -> None:
    image = permute(np.arange(10_000), 10_000, 7)
    assert abs(np.corrcoef(np.arange(10_000), image)[0, 1]) < 0.05
    assert (permute(np.arange(10_000), 10_000, 8) == image).mean() < 0.01
    assert permute(np.array([5]), 2**40, 1)[0] < 2**40


def test_ranks_together_are_one_device() -> None:
    one = BatchSampler(tokens(), 10, 12, data_share(12, 1), seed=3)
    for size, micro in ((2, 3), (4, 1), (3, 2)):
        parts = [
            BatchSampler(tokens(), 10, 12, data_share(12, micro, d, size), seed=3)
            for d in range(size)
        ]
        for call in (lambda s: s.batch(9), lambda s: s.evaluation(1)):
            together = torch.cat([call(part)[0].reshape(-1, 10) for part in parts])
            assert torch.equal(together, call(one)[0].reshape(-1, 10))
        assert parts[0].batch(0)[0].shape == (12 // size // micro, micro, 10)


def test_targets_are_the_next_tokens() -> None:
    inputs, targets, _ = BatchSampler(tokens(), 10, 4, data_share(4, 2)).batch(0)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)


def test_epochs_cover_the_text_in_other_orders() -> None:
    sampler = BatchSampler(tokens(), 10, 3, data_share(3, 1), seed=1)
    assert sampler.train.sequences == [99]
    orders = [order(sampler, np.arange(e * 99, (e + 1) * 99)).tolist() for e in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(99))
    assert orders[0] != orders[1]
    across = order(sampler, np.arange(90, 110)).tolist()
    assert across == orders[0][90:] + orders[1][:11]
    other = BatchSampler(tokens(), 10, 3, data_share(3, 1), seed=2)
    assert order(other, np.arange(99)).tolist() != orders[0]


def test_resumes_by_sample_index_under_another_batch() -> None:
    first = BatchSampler(tokens(), 10, 4, data_share(4, 1))
    second = BatchSampler(tokens(), 10, 8, data_share(8, 2))
    old = torch.cat([first.batch(s)[0].reshape(-1, 10) for s in (6, 7)])
    assert torch.equal(second.take(first.sample_index(6))[0].reshape(-1, 10), old)


def test_short_text_is_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"training\.sequence_length: 1000 needs 1001 tokens, the training text has 1000",
    ):
        BatchSampler(tokens(), 1000, 4, data_share(4, 1))
    with pytest.raises(ValueError, match="the held-out text has 3"):
        BatchSampler(tokens(holdout=3), 10, 4, data_share(4, 1)).evaluation(0)
