"""Gradients of a bucket: whole until they are reduced once a step, or whole only on their way into
this rank's piece.

Gradients are summed, not averaged: the loss is already divided by the step's global number of
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from workbench.parallel.async_collectives import Finish
from workbench.parallel.data.data_collectives import piece, start_scatter, start_sum
from workbench.parallel.data.flat_buckets import Packing
from workbench.runtime_facts.cast_sizes import GRADIENT_CAST_NUMEL

Works = Iterator[Finish | None]
"""Collectives, each begun when it is asked for, which is after the former has ended."""


def add_narrow(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient to a total of another dtype, piece by piece: widening it whole would double
    its memory.
    """
    for into, part in zip(
        total.flatten().split(GRADIENT_CAST_NUMEL), gradient.flatten().split(GRADIENT_CAST_NUMEL)
    ):
        into.add_(part.to(into.dtype))


class Kept:
    """A bucket's gradients, whole from microbatch to microbatch, and reduced in place once a
    step.
    """

    def __init__(self, packing: Packing, dtype: torch.dtype, device: torch.device) -> None:
        self.packing = packing
        self.flat = torch.zeros(packing.size, dtype=dtype, device=device)
        self.views = packing.views(self.flat)
        self.piece = piece(self.flat, packing.shard)

    @property
    def lasting(self) -> Tensor:
        """What lives from step to step."""
        return self.flat

    def start(self) -> None:
        """Start a step with gradients of zero."""
        self.flat.zero_()

    def grad(self, name: str) -> Tensor | None:
        """Where autograd may add a gradient by itself."""
        return self.views[name]

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a microbatch's gradient of a parameter."""
        view = self.views[name]
        if view.dtype == gradient.dtype:
            view.add_(gradient)
        else:
            add_narrow(view, gradient)

    @property
    def chained(self) -> bool:
        """Whether several collectives follow one another."""
        return self.packing.shard.size > 1 and self.packing.replicate.size > 1

    def due(self, last: bool) -> bool:
        """Whether there is something to reduce after this microbatch."""
        return last

    def reduction(self, last: bool) -> Works:
        """Sum over all ranks that hold the same parameters; this rank's piece is right
        afterwards.
        """
        yield start_scatter(self.flat, self.packing.shard)
        yield start_sum(self.piece, self.packing.replicate)


class Passing:
    """A bucket's gradients, whole only until their reduce-scatter, which adds to the piece that
    lasts.
    """

    def __init__(self, packing: Packing, dtype: torch.dtype, device: torch.device) -> None:
        self.packing, self.dtype, self.device = packing, dtype, device
        self.piece = torch.zeros(packing.size // packing.shard.size, dtype=dtype, device=device)
        self._whole: Tensor | None = None
        self._missing: dict[str, Tensor] = {}

    @property
    def lasting(self) -> Tensor:
        """What lives from step to step."""
        return self.piece

    def start(self) -> None:
        """Start a step with gradients of zero."""
        self.piece.zero_()

    def grad(self, name: str) -> Tensor | None:
        """Nowhere: there is no room yet."""
        return None

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a microbatch's gradient of a parameter."""
        if self._whole is None:
            self._whole = torch.empty(self.packing.size, dtype=self.dtype, device=self.device)
            self._missing = self.packing.views(self._whole)
        if (fresh := self._missing.pop(name, None)) is not None:
            fresh.copy_(gradient)
        else:
            add_narrow(self.packing.views(self._whole)[name], gradient)

    @property
    def chained(self) -> bool:
        """Always: the sum is added to what lasts, and the whole gradient let go."""
        return True

    def due(self, last: bool) -> bool:
        """Whether there is something to reduce after this microbatch."""
        return True

    def reduction(self, last: bool) -> Works:
        """Sum over the shard group into the piece that lasts; over its replicas only once a
        step.
        """
        if self._whole is not None:
            whole, self._whole = self._whole, None
            for view in self._missing.values():
                view.zero_()
            self._missing = {}
            yield start_scatter(whole, self.packing.shard)
            self.piece.add_(piece(whole, self.packing.shard))
            del whole
        if last:
            yield start_sum(self.piece, self.packing.replicate)


class Flight:
    """A reduction under way; `chained`: it has more to do than one collective, and is to be
    advanced soon.
    """

    def __init__(self, works: Works, chained: bool) -> None:
        self._works, self.chained = works, chained
        self._now: Finish | None = None
        self.done = False
        self.advance()

    def advance(self) -> None:
        """Wait for the collective under way and begin the next, if there is one."""
        if self._now is not None:
            self._now()
        for finish in self._works:
            if finish is not None:
                self._now = finish
                return
        self._now, self.done = None, True
