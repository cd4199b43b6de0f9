"""What a collective adds to the work around it, by the moments at which ranks enter and leave it.

Between two calls every rank computes, as between the collectives of two layers. A call is over when
its last rank leaves, so that waiting for a rank that computed longer counts, as it does in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray


def seconds_added(
    between: Callable[[], object], call: Callable[[], object], calls: int
) -> NDArray[np.float64]:
    """Seconds that each of `calls` calls adds; all ranks call this at the same time.

    Args:
        between: Work that every rank does before each call.
        call: The collective.
        calls: Calls after a first one, which brings the ranks together.
    """
    moments = torch.empty(calls + 1, 2, dtype=torch.float64)
    for each in moments:
        between()
        each[0] = time.monotonic()
        call()
        each[1] = time.monotonic()
    ranks = [torch.empty_like(moments) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, moments)
    return added_by_calls(torch.stack(ranks).numpy())


def added_by_calls(moments: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds that each call after the first adds: from the end of one to that of the next, less
    what the work between them usually takes.

    Args:
        moments: When each rank entered and left each call, `[ranks, calls, 2]`, by one clock.
    """
    entered, left = moments[..., 0], moments[..., 1]
    work = float(np.median(entered[:, 1:] - left[:, :-1]))
    return np.asarray(np.diff(left.max(axis=0)) - work)
