"""What a collective adds to the work around it, by the moments at which ranks enter and leave it.

Between two calls every rank computes, as between the collectives of two layers. A call is over when
its last rank leaves, so that waiting for a rank that computed longer counts, as it does in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray


class Added(NamedTuple):
    """What calls of a collective add to the work between them."""

    seconds: NDArray[np.float64]
    """Of each call, until its last rank has left it."""
    cpu_seconds: float
    """Of a call, mean; this rank's, with those of the threads that move its bytes."""


def added(between: Callable[[], object], call: Callable[[], object], calls: int) -> Added:
    """Time that each of `calls` calls adds; all ranks call this at the same time.

    Args:
        between: Work that every rank does on one thread before each call.
        call: The collective.
        calls: Calls after a first one, which brings the ranks together.
    """
    moments, work, begin = [], 0.0, time.process_time()
    for _ in range(calls + 1):
        before = time.thread_time()
        between()
        work += time.thread_time() - before
        entered = time.monotonic()
        call()
        moments.append((entered, time.monotonic()))
    cpu = (time.process_time() - begin - work) / (calls + 1)
    own = torch.tensor(moments, dtype=torch.float64)
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    return Added(added_by_calls(torch.stack(ranks).numpy()), cpu)


def added_by_calls(moments: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds that each call after the first adds: from the end of one to that of the next, less
    what the work between them usually takes.

    Args:
        moments: When each rank entered and left each call, `[ranks, calls, 2]`, by one clock.
    """
    entered, left = moments[..., 0], moments[..., 1]
    work = float(np.median(entered[:, 1:] - left[:, :-1]))
    return np.asarray(np.diff(left.max(axis=0)) - work)
