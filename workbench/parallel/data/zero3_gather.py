"""ZeRO-3 (FSDP) hooks: when parameters are all-gathered, prefetched and resharded.

Without a pipeline every unit (embedding, each block, final norm with head) is all-gathered before
it computes and resharded afterwards, while the all-gathers of the next units are in flight: up to
`data.in_flight` at a time (Zhao et al. 2023, arXiv 2304.11277). Under a pipeline a stage is
all-gathered before its first forward and resharded after its last backward, and no autograd hook
starts a collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.models import Transformer
from workbench.parallel.data.sharded_params import ShardedParams


class ComputeSegment:
    """Modules that compute one after another, and the buckets that their passes read.

    `forward` and `backward` list the sharded buckets that forward and backward read, those of tiles
    left out: `tile_gather` gathers them.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        buckets: dict[int, ShardedParams],
        read_in_backward: list[nn.Module],
    ) -> None:
        self.modules = modules
        self.forward, self.backward = (
            list(dict.fromkeys(buckets[id(p)] for p in _parameters(read) if id(p) in buckets))
            for read in (modules, read_in_backward)
        )


def _parameters(modules: list[nn.Module]) -> Iterator[nn.Parameter]:
    return (parameter for module in modules for parameter in module.parameters())


def compute_segments(model: nn.Module, buckets: dict[int, ShardedParams]) -> list[ComputeSegment]:
    """Segments of a stage in the order of forward; `buckets` by the id of their parameters."""
    return [ComputeSegment(modules, buckets, read) for modules, read in _modules(model)]


def _modules(model: nn.Module) -> Iterator[tuple[list[nn.Module], list[nn.Module]]]:
    """(modules of each segment, those whose parameters its backward reads).

    The gradient of an embedding table needs the indices only. A model given as Python is one
    segment: nothing says when each part of it computes.
    """
    if not isinstance(model, Transformer):
        yield [model], [model]
        return
    if model.embedding is not None:
        yield [model.embedding], [model.embedding.norm] if model.embedding.norm is not None else []
    for block in model.blocks.values():
        yield [block], [block]
    if model.head is not None and model.final_norm is not None:
        yield [model.final_norm, model.head], [model.final_norm, model.head]


class StageGatherer:
    """Keeps a pipeline stage unsharded from its first forward of a step until `reshard`."""

    def __init__(self, model: nn.Module, buckets: dict[int, ShardedParams]) -> None:
        segments = compute_segments(model, buckets)
        self.buckets = [bucket for segment in segments for bucket in segment.forward]
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward)

    def reshard(self) -> None:
        """Reshard the stage, after its last backward."""
        for bucket in self.buckets:
            bucket.reshard()

    def _before_forward(self, *_: object) -> None:
        for bucket in self.buckets:
            bucket.start_unshard()
        for bucket in self.buckets:
            bucket.unshard()

    def _after_forward(self, *_: object) -> None:
        if not torch.is_grad_enabled():
            self.reshard()


class UnitGatherer:
    """Keeps one unit unsharded, with the all-gathers of the next `num_prefetch` in flight.

    With `keep_gathered` units stay unsharded from a step's first forward on, until `reshard`.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: dict[int, ShardedParams],
        keep_gathered: bool,
        num_prefetch: int,
    ) -> None:
        self.segments = compute_segments(model, buckets)
        self.keep_gathered, self.num_prefetch = keep_gathered, num_prefetch
        self._backward_index: int | None = None
        """The segment that backward is in; its forward is recomputed meanwhile (activation
        checkpointing), and must neither gather nor reshard.
        """
        for index, segment in enumerate(self.segments):
            segment.modules[0].register_forward_pre_hook(partial(self._before_forward, index))
            segment.modules[-1].register_forward_hook(partial(self._after_forward, index))

    def reshard(self) -> None:
        """Reshard all units, after the step's last backward."""
        self._backward_index = None
        for segment in self.segments:
            for bucket in segment.forward:
                bucket.reshard()

    def _before_forward(self, index: int, *_: object) -> None:
        if self._recomputes(index):
            return
        self._backward_index = None
        self._unshard(self.segments[index].forward, self._next_buckets(index))

    def _after_forward(self, index: int, module: nn.Module, inputs: Any, outputs: Any) -> None:
        training = torch.is_grad_enabled()
        if not self._recomputes(index):
            last = index + 1 == len(self.segments)
            # Backward begins with the last segment, which therefore stays unsharded.
            if not training or not (last or self.keep_gathered):
                self._reshard(self.segments[index].forward, but=self._next_buckets(index))
        if training:
            # The gradient of a segment's output is the first that its backward sees; that of an
            # input passed on, as the residual stream of parallel branches is, is its last.
            passed_on = {id(given) for given in inputs}
            for output in outputs if isinstance(outputs, tuple) else (outputs,):
                made = isinstance(output, Tensor) and id(output) not in passed_on
                if made and output.requires_grad:
                    output.register_hook(partial(self._before_backward, index))

    def _before_backward(self, index: int, gradient: Tensor) -> None:
        if index and self._backward_index == index:
            return
        self._backward_index = index or None  # the embedding is never recomputed
        segment, done = self.segments[index], self.segments[index + 1 : index + 2]
        if not self.keep_gathered:
            self._reshard([b for each in done for b in each.forward], but=segment.backward)
        ahead = reversed(self.segments[max(index - self.num_prefetch, 0) : index])
        self._unshard(segment.backward, [b for each in ahead for b in each.backward])

    def _next_buckets(self, index: int) -> list[ShardedParams]:
        """What forward prefetches in segment `index`."""
        ahead = self.segments[index + 1 :][: self.num_prefetch]
        return [bucket for segment in ahead for bucket in segment.forward]

    def _recomputes(self, index: int) -> bool:
        return self._backward_index == index and torch.is_grad_enabled()

    @staticmethod
    def _unshard(needed: list[ShardedParams], prefetched: list[ShardedParams]) -> None:
        # All are started before the first is waited for, and in the same order on every rank.
        for bucket in (*needed, *prefetched):
            bucket.start_unshard()
        for bucket in needed:
            bucket.unshard()

    @staticmethod
    def _reshard(buckets: list[ShardedParams], but: list[ShardedParams]) -> None:
        for bucket in buckets:
            if bucket not in but:
                bucket.reshard()
