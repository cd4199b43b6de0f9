"""Stages are dealt so that the costliest costs least."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import examples
from workbench.plan.catalog.catalog import models
from workbench.plan.stage_partition import balanced, costs, dealt


def costliest(
    blocks: list[float],
    counts: list[int],
    first: float,
    last: float,
    parts: list[float] | None = None,
) -> float:
    """Cost of the costliest stage, of each of which its part counts."""
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    loads = [sum(blocks[a:b]) for a, b in pairwise(ends)]
    loads[0] += first
    loads[-1] += last
    return max(part * load for part, load in zip(parts or [1.0] * len(loads), loads))


@given(
    st.lists(st.integers(0, 9).map(float), min_size=1, max_size=8),
    st.integers(1, 8),
    st.integers(0, 9),
    st.integers(0, 20),
    st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=8, max_size=8),
)
@settings(max_examples=examples(150), deadline=None)
def test_no_other_way_is_better(
    blocks: list[float], stages: int, first: int, last: int, parts: list[float]
) -> None:
    stages = min(stages, len(blocks))
    parts = parts[:stages]
    found = dealt(blocks, stages, first, last, parts)
    assert len(found) == stages and sum(found) == len(blocks) and min(found) >= 1
    ways = (
        [b - a for a, b in pairwise((0, *cut, len(blocks)))]
        for cut in combinations(range(1, len(blocks)), stages - 1)
    )
    assert costliest(blocks, found, first, last, parts) == min(
        costliest(blocks, way, first, last, parts) for way in ways
    )


def test_leading_dense_blocks_weigh_what_they_cost() -> None:
    shape = models()["deepseek-v3"].shape
    embedding, blocks, head = costs(shape, 4096)
    found = balanced(shape, 8, 4096)
    assert len(set(blocks)) > 1
    assert costliest(blocks, found, embedding, head) <= costliest(
        blocks, [7, 8, 8, 8, 8, 8, 7, 7], embedding, head
    )


def test_equal_blocks_are_dealt_as_the_exact_way_deals_them() -> None:
    shape = models()["llama-3-8b"].shape
    embedding, blocks, head = costs(shape, 8192)
    for stages in (1, 2, 3, 5, 8, 16, 32):
        counts = [balanced(shape, stages, 8192), dealt(blocks, stages, embedding, head)]
        assert costliest(blocks, counts[0], embedding, head) == costliest(
            blocks, counts[1], embedding, head
        )
