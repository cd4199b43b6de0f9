"""Asynchronous collectives that hold no memory beyond their own tensors, and those until waited
for.

NCCL's collectives are so. Gloo's are not: its all-gather fills a copy of the whole output and its
reduce-scatter sums a copy of the whole input, on threads of its own, which free them whenever they
are scheduled. On gloo an all-gather is therefore done as broadcasts straight into the output, and a
reduce-scatter as an all-reduce in place. The tensors alive at a point of the program are then the
same on every rank, in every run, and in a rehearsal, whose collectives complete at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.parallel.mesh import MeshAxis

WaitFn = Callable[[], None]
"""Waits for a collective that has been started, and releases its tensors; to be called once."""

# torch 2.13 renamed both.
_reduce_scatter: Callable[..., object] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
_all_gather: Callable[..., object] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


@dataclass(frozen=True, eq=False)
class CompositeCollective:
    """A collective made of other collectives; `dtype` and `bytes` are those of its larger side."""

    kind: str
    group: dist.ProcessGroup
    dtype: torch.dtype
    bytes: int


_current_composite: CompositeCollective | None = None


def current_composite() -> CompositeCollective | None:
    """The collective that operations issued now are parts of; None if each stands for itself.

    Whoever records collectives counts the composite once, instead of its parts.
    """
    return _current_composite


@contextmanager
def _composed_as(kind: str, unsharded: Tensor, axis: MeshAxis) -> Iterator[None]:
    global _current_composite
    assert axis.group is not None
    _current_composite = CompositeCollective(kind, axis.group, unsharded.dtype, unsharded.nbytes)
    try:
        yield
    finally:
        _current_composite = None


def start_collective(collective: Callable[..., Any], *tensors: Tensor) -> WaitFn:
    """Start a collective on aliases of `tensors`, which are held until it is waited for.

    The aliases die with the wait, so that the collective keeps no graph of autograd and no storage
    alive afterwards.
    """
    return start_collectives([(collective, tensors)])


def start_collectives(calls: Sequence[tuple[Callable[..., Any], Sequence[Tensor]]]) -> WaitFn:
    """Start several collectives, each with its tensors, to be waited for together.

    All ranks must name them in the same order.
    """
    aliases = [[x.detach() for x in tensors] for _, tensors in calls]
    works = [collective(*own, async_op=True) for (collective, _), own in zip(calls, aliases)]

    def wait() -> None:
        while works:
            works.pop(0).wait()
        for own in aliases:
            _empty(own)
        aliases.clear()

    return wait


def run_collective(collective: Callable[..., object], *tensors: Tensor) -> None:
    """Run a collective on aliases of `tensors` and wait for it."""
    start_collective(collective, *tensors)()


def _empty(aliases: Sequence[Tensor]) -> None:
    """Drop the storage of a finished collective's aliases.

    Gloo's thread holds the tensors a moment after the result is there. If it were the last to hold
    their storage, the memory would be freed nondeterministically late, on a thread whose frees the
    CPU allocator's profile does not see.
    """
    for alias in aliases:
        if type(alias) is Tensor and alias.device.type == "cpu":
            # Unlike `set_()` this leaves the version counter that an alias shares alone.
            alias.data = alias.new_empty(0)


def all_gather_async(output: Tensor, shard: Tensor, axis: MeshAxis) -> WaitFn:
    """Start an all-gather: `output` is filled with the ranks' equal shards in order.

    Args:
        output: Contiguous, `axis.size` times as many elements as `shard`.
        shard: This rank's; may be its view into `output`.
    """
    if not _on_gloo(axis):
        return start_collective(partial(_all_gather, group=axis.group), output, shard)
    shards = _shards(output, axis)
    if shards[axis.index].data_ptr() != shard.data_ptr():
        shards[axis.index].copy_(shard.detach().flatten())
    with _composed_as("all_gather", output, axis):
        wait_broadcasts = start_collectives(
            [
                (partial(dist.broadcast, group=axis.group, group_src=index), [each])
                for index, each in enumerate(shards)
            ]
        )
    held = [output, shard]  # as NCCL's own all-gather holds both

    def wait() -> None:
        wait_broadcasts()
        held.clear()

    return wait


def reduce_scatter_async(shard: Tensor, source: Tensor, axis: MeshAxis) -> WaitFn:
    """Start a reduce-scatter: the ranks' `source` are summed, and each keeps its equal shard.

    Args:
        shard: Output; may be this rank's view into `source`.
        source: Contiguous, `axis.size` times as many elements; overwritten on gloo.
    """
    if not _on_gloo(axis):
        return start_collective(partial(_reduce_scatter, group=axis.group), shard, source)
    with _composed_as("reduce_scatter", source, axis):
        wait_sum = start_collective(partial(dist.all_reduce, group=axis.group), source)
    outputs = [(shard.detach().flatten(), _shards(source, axis)[axis.index])]

    def wait() -> None:
        wait_sum()
        into, own = outputs.pop()
        if into.data_ptr() != own.data_ptr():
            into.copy_(own)

    return wait


def _shards(unsharded: Tensor, axis: MeshAxis) -> tuple[Tensor, ...]:
    return unsharded.detach().flatten().chunk(axis.size)


def _on_gloo(axis: MeshAxis) -> bool:
    return dist.get_backend(axis.group) == dist.Backend.GLOO
