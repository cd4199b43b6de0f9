"""Best-fit decreasing bin packing: items into as few bins of one size as it finds.

Items are taken by falling length, each into the bin with the least space that still holds it
(Johnson 1974: at most 11/9 of the fewest bins, and 4); as in "Fewer Truncations Improve Language
Modeling" (2404.10830) for sequences of documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from workbench.corpora.sample_order import permute


def pack_best_fit(lengths: np.ndarray, capacity: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack items into bins.

    Args:
        lengths: int64 [items], each from 1 to `capacity`.
        capacity: Of a bin.
        seed: Decides between items of one length.

    Returns:
        The items by bin, int64 [items], and where each bin begins in them, int64 [bins + 1].
    """
    mixed = permute(np.arange(len(lengths)), len(lengths), seed)
    order = mixed[np.argsort(-lengths[mixed], kind="stable")]
    spaces: list[int] = []
    """What is left in open bins, ascending, each once."""
    by_space: dict[int, list[int]] = {}
    bins = np.empty(len(lengths), np.int64)
    count = 0
    for item, length in zip(order.tolist(), lengths[order].tolist()):
        at = bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces[at]
            chosen = by_space[space].pop()
            if not by_space[space]:
                del spaces[at], by_space[space]
        else:
            space, chosen, count = capacity, count, count + 1
        bins[item] = chosen
        if left := space - length:
            if left not in by_space:
                insort(spaces, left)
                by_space[left] = []
            by_space[left].append(chosen)
    items = np.argsort(bins, kind="stable")
    return items, np.searchsorted(bins[items], np.arange(count + 1))
