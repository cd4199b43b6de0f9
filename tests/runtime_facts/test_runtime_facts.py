"""Sizes that the runtime works in and the cost model counts."""

import numpy as np
import pytest

from workbench.runtime_facts.bucket_packing import pack_by_size, padded_numel
from workbench.runtime_facts.loss_chunks import loss_chunk_columns, loss_chunk_tokens

TOKENS, VOCAB = (1, 300, 5000, 8192, 70000), (7, 1000, 32000, 128, 50257)


@pytest.mark.parametrize("hidden", [8, 96, 4096])
def test_chunks_of_an_array_are_those_of_each_integer(hidden: int) -> None:
    found = loss_chunk_tokens(np.array(TOKENS), hidden, np.array(VOCAB))
    assert found.tolist() == [int(loss_chunk_tokens(t, hidden, v)) for t, v in zip(TOKENS, VOCAB)]


def test_logits_are_padded_to_whole_vectors() -> None:
    assert [loss_chunk_columns(v) for v in (1, 64, 65)] == [64, 64, 128]


def test_a_bucket_closes_before_it_is_too_large() -> None:
    tensors = [("a", 3), ("a", 4), ("b", 5), ("a", 4), ("a", 99), ("b", 5)]
    assert list(pack_by_size(tensors, 8)) == [[0, 1], [3], [2], [4], [5]]
    assert list(pack_by_size(tensors, float("inf"))) == [[0, 1, 3, 4], [2, 5]]
    assert list(pack_by_size([], 8)) == []


def test_a_bucket_is_padded_to_equal_aligned_shards() -> None:
    assert [padded_numel([n], 4) for n in (0, 1, 256, 257)] == [0, 256, 256, 512]
    assert padded_numel([1, 65, 64], 1) == 64 + 128 + 64
    assert padded_numel([1, 65, 64], 3) == 3 * 128
