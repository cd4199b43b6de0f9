"""How much longer a step takes on a nearly full GPU, where the caching allocator retries.

torch's caching allocator keeps freed blocks. Where `cudaMalloc` finds no memory for a new one, it
frees what it keeps, waits for the GPU, and tries again (`CUDACachingAllocator.cpp`; counted as
`num_alloc_retries`, of which DeepSpeed's `stage3.py` and torchtitan's metrics warn).
"""

from __future__ import annotations

import numpy as np

from workbench.costmodel.inputs.config import Array
from workbench.costmodel.memory.reported_memory import probability_of_running_out
from workbench.costmodel.rates.constants import Constants
from workbench.costmodel.rates.fitted_constants import retry_slowdown
from workbench.costmodel.rates.fitted_memory import published_memory_fit

TABLE_PEAKS = 2048
"""Peaks, evenly spaced in logarithm, between which a search interpolates."""
LEAST_SHARE, MOST_SHARE = 0.25, 4.0
"""Shares of a GPU's memory that the table begins and ends at."""


def retry_region(capacity: float, k: Constants) -> float:
    """Needed memory, bytes, from which on the allocator retries: what it usually keeps beside what
    it handed out no longer fits a GPU of `capacity` bytes.
    """
    kept = published_memory_fit().slack
    return capacity * min(1.0, (1 + k.fragmentation) / (1 + kept))


def near_full_slowdown(peak: float, capacity: float, stack: str, k: Constants) -> float:
    """Expected multiple of the step time by retries, provided that the step runs at all.

    The needed memory is distributed around its prediction as the probability of running out says;
    of a step that runs, the share that lies beyond `retry_region` is slower by the fitted
    `retry_slowdown`. Frameworks without a caching allocator (no fragmentation) never retry.

    Args:
        peak: Predicted peak, bytes.
        capacity: Memory of the GPU, bytes.
        stack: Framework profile.
        k: Constants of GPU and framework.

    Returns:
        1 far below the region, at most `retry_slowdown()`.
    """
    slowest = retry_slowdown()
    if k.fragmentation <= 0 or slowest <= 1:
        return 1.0
    fails = probability_of_running_out(peak, capacity, stack)
    beyond = probability_of_running_out(peak, retry_region(capacity, k), stack)
    near = (beyond - fails) / (1 - fails) if fails < 1 else 1.0
    return 1 + (slowest - 1) * near


def slowdown_table(capacity: float, stack: str, k: Constants) -> tuple[Array, Array]:
    """(logarithms of peaks in bytes, `near_full_slowdown` at each): to interpolate in a search."""
    peaks = capacity * np.geomspace(LEAST_SHARE, MOST_SHARE, TABLE_PEAKS)
    slow = [near_full_slowdown(float(peak), capacity, stack, k) for peak in peaks]
    return np.log(peaks), np.array(slow)
