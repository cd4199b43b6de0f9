"""Best-fit decreasing packing: every item once, no bin overfull, as full as best fit gets them."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workbench.corpora.conversations.best_fit_packing import pack_best_fit


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(0, 9))
def test_bins_hold_every_item_once(lengths: list[int], seed: int) -> None:
    sizes = np.array(lengths)
    items, bins = pack_best_fit(sizes, 40, seed)
    assert sorted(items.tolist()) == list(range(len(sizes)))
    loads = np.add.reduceat(sizes[items], bins[:-1])
    assert bins[-1] == len(items) and (np.diff(bins) > 0).all() and (loads <= 40).all()
    # Any-fit: what two bins hold never fits into one.
    assert len(loads) < 2 or sum(sorted(loads)[:2]) > 40


def test_the_fullest_bin_that_fits_is_taken() -> None:
    items, bins = pack_best_fit(np.array([6, 5, 3, 4, 2]), 10, 0)
    found = [sorted(items[a:b].tolist()) for a, b in pairwise(bins)]
    assert found == [[0, 3], [1, 2, 4]]


def test_the_seed_decides_between_equal_lengths() -> None:
    sizes = np.full(50, 5)
    first, again, other = (pack_best_fit(sizes, 10, seed)[0].tolist() for seed in (1, 1, 2))
    assert first == again != other
