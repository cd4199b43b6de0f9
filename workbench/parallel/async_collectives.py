"""Collectives in flight: none holds memory beyond its own tensors, and it holds those until it is
waited for.

So it is with NCCL. Gloo is different: its all-gather fills a copy of the whole output and its
reduce-scatter sums a copy of the whole input, on threads of its own, which let go of them whenever
they get a core. Ranks on gloo therefore broadcast their pieces straight to where they belong, and
sum in place. What is alive at a point of the program is then the same on every rank, in every run,
and in a rehearsal, where every collective is over at once.
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

Finish = Callable[[], None]
"""Waits for a collective that has begun, and lets go of its tensors; to be called once."""

_reduce_scatter: Callable[..., object] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
_all_gather: Callable[..., object] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
"""torch 2.13 renamed both."""


@dataclass(frozen=True, eq=False)
class Composed:
    """A collective that is made of other operations; `dtype` and `bytes` are those of its larger
    side.
    """

    kind: str
    group: dist.ProcessGroup
    dtype: torch.dtype
    bytes: int


_composing: Composed | None = None


def composing() -> Composed | None:
    """The collective that the operations of this moment are parts of; None where each stands for
    itself.
    """
    return _composing


@contextmanager
def _part_of(kind: str, whole: Tensor, axis: MeshAxis) -> Iterator[None]:
    global _composing
    assert axis.group is not None
    _composing = Composed(kind, axis.group, whole.dtype, whole.nbytes)
    try:
        yield
    finally:
        _composing = None


def begin(collective: Callable[..., Any], *tensors: Tensor) -> Finish:
    """Begin a collective on aliases of `tensors`, which are held until it is finished, and by
    nothing afterwards.
    """
    return begin_together([(collective, tensors)])


def begin_together(calls: Sequence[tuple[Callable[..., Any], Sequence[Tensor]]]) -> Finish:
    """Begin several collectives, each with its tensors, in the same order on all ranks; one call
    waits for all.
    """
    aliases = [[x.detach() for x in tensors] for _, tensors in calls]
    works = [collective(*own, async_op=True) for (collective, _), own in zip(calls, aliases)]

    def finish() -> None:
        while works:
            works.pop(0).wait()
        for own in aliases:
            _empty(own)
        aliases.clear()

    return finish


def call(collective: Callable[..., object], *tensors: Tensor) -> None:
    """Run a collective on aliases of `tensors` and wait for it."""
    begin(collective, *tensors)()


def _empty(aliases: Sequence[Tensor]) -> None:
    """Take the memory from a finished collective's aliases, which gloo's thread holds a moment
    longer.

    Else that thread may be the last to hold the memory, which lives as long as the scheduler lets
    it, and is freed where the allocator's running sum does not see it.
    """
    for alias in aliases:
        if type(alias) is Tensor and alias.device.type == "cpu":
            alias.data = alias.new_empty(0)  # unlike set_(), counts as no change of what it aliased


def begin_all_gather(whole: Tensor, piece: Tensor, axis: MeshAxis) -> Finish:
    """Begin filling `whole` with the ranks' equal pieces in order, of which `piece` is this
    rank's.
    """
    if not _on_gloo(axis):
        return begin(partial(_all_gather, group=axis.group), whole, piece)
    pieces = _pieces(whole, axis)
    if pieces[axis.index].data_ptr() != piece.data_ptr():
        pieces[axis.index].copy_(piece.detach().flatten())
    with _part_of("all_gather", whole, axis):
        told = begin_together(
            [
                (partial(dist.broadcast, group=axis.group, group_src=index), [each])
                for index, each in enumerate(pieces)
            ]
        )
    held = [whole, piece]

    def finish() -> None:
        told()
        held.clear()

    return finish


def begin_reduce_scatter(piece: Tensor, whole: Tensor, axis: MeshAxis) -> Finish:
    """Begin summing the ranks' contiguous `whole`, of which each keeps its equal piece in `piece`;
    `whole` is spent.
    """
    if not _on_gloo(axis):
        return begin(partial(_reduce_scatter, group=axis.group), piece, whole)
    with _part_of("reduce_scatter", whole, axis):
        summed = begin(partial(dist.all_reduce, group=axis.group), whole)
    kept = [(piece.detach().flatten(), _pieces(whole, axis)[axis.index])]

    def finish() -> None:
        summed()
        into, own = kept.pop()
        if into.data_ptr() != own.data_ptr():
            into.copy_(own)

    return finish


def _pieces(whole: Tensor, axis: MeshAxis) -> tuple[Tensor, ...]:
    return whole.detach().flatten().chunk(axis.size)


def _on_gloo(axis: MeshAxis) -> bool:
    return dist.get_backend(axis.group) == dist.Backend.GLOO
