"""Where parameters lie in a flat bucket."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.parallel.data.flat_buckets import BucketLayout
from workbench.parallel.data.gradient_reduction import ShardedGrads
from workbench.parallel.mesh import MeshAxis
from workbench.planned_device import HOST

VECTOR_BYTES = 16
SHAPES = st.lists(st.tuples(st.integers(1, 70), st.integers(1, 3)), min_size=1, max_size=6)


def bucket(shapes: list[tuple[int, ...]], ranks: int, rank: int = 0) -> BucketLayout:
    alone = MeshAxis("", 1, 0, (rank,), None)
    shard = MeshAxis("shard", ranks, rank, tuple(range(ranks)), None)
    return BucketLayout(dict(zip("abcdef", shapes)), "replicas", shard, alone, ())


@given(SHAPES, st.integers(1, 9))
def test_all_tensors_and_their_parts_are_aligned(shapes: list[tuple[int, ...]], ranks: int) -> None:
    """An odd bias before them puts no tensor off the addresses that wide loads need."""
    whole = bucket(shapes, ranks)
    flat = torch.zeros(whole.numel, dtype=torch.bfloat16)
    views = [*whole.views(flat).values()]
    for rank in range(ranks):
        part = bucket(shapes, ranks, rank)
        views += part.shard_views(flat.chunk(ranks)[rank]).values()
    assert not any((view.data_ptr() - flat.data_ptr()) % VECTOR_BYTES for view in views)


@given(SHAPES, st.integers(1, 9))
def test_ranks_own_every_element_once(shapes: list[tuple[int, ...]], ranks: int) -> None:
    whole = bucket(shapes, ranks)
    flat = torch.zeros(whole.numel)
    for rank in range(ranks):
        for view in bucket(shapes, ranks, rank).shard_views(flat.chunk(ranks)[rank]).values():
            view += 1
    for view in whole.views(flat).values():
        assert view.min() == view.max() == 1
    for gap in whole.padding():
        assert flat[gap].abs().sum() == 0
        flat[gap] = 1
    assert flat.min() == 1


def test_padding_of_reduced_gradients_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever memory held before would be sent, and `TORCH_NCCL_NAN_CHECK` looks at all of it."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    grads = ShardedGrads(bucket([(3, 5), (7,)], 1), torch.float32, HOST)
    grads.accumulate("a", torch.ones(3, 5))
    buffer = grads._unsharded
    assert buffer is not None
    next(grads.reduction(last_microbatch=False))
    assert buffer.isfinite().all()
