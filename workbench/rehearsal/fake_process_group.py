"""The private parts of torch that a rehearsal stands on, in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from workbench.models.torch_dispatch import FakeTensorMode

if not "2.11" <= torch.__version__ < "2.14":
    raise ImportError(
        f"rehearsals use torch's fake process group of 2.11 to 2.13, not {torch.__version__}"
    )


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """A process group of `world_size` in which this process is `rank` and every collective returns
    at once.
    """
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_tensors() -> FakeTensorMode:
    """Inside, tensors have a shape, a dtype and a storage size, and no bytes."""
    return FakeTensorMode()


@contextmanager
def without_cached_results(mode: FakeTensorMode) -> Iterator[None]:
    """Inside, every operator runs on fake tensors.

    A view that the mode has cached makes its storage large enough; storages that are still empty
    (ZeRO-3) would then look allocated.
    """
    mode.cache_enabled = False
    try:
        yield
    finally:
        mode.cache_enabled = True
