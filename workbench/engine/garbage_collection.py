"""Python's garbage collector, run by all ranks after the same steps.

Left to itself it stops each rank for milliseconds at a step of its own, and every collective then
waits for the last. torchtitan collects on common steps likewise.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COLLECT_EVERY = 50
"""Steps from one collection to the next. A step leaves no tensor to it: all are freed by count."""


@contextmanager
def collected_on_common_steps() -> Iterator[Callable[[int], None]]:
    """Leave what exists now out of every collection, and collect only where asked.

    Yields:
        A function to call after each step, with the number of steps done.
    """

    def collect(done: int) -> None:
        if done % COLLECT_EVERY == 0:
            gc.collect()

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield collect
    finally:
        gc.enable()
        gc.unfreeze()
