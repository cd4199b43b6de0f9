"""Parameters of a bucket: always whole (ZeRO-0 to 2), or whole only while a unit computes
(ZeRO-3).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from workbench.parallel.async_collectives import Finish
from workbench.parallel.data.data_collectives import piece, start_gather
from workbench.parallel.data.flat_buckets import Packing
from workbench.parallel.data.storage_resize import resize_storage
from workbench.parallel.data.zero_offload import to_host

Draw = Callable[[str], Tensor]
"""Local name -> the initial value, on the rank's device."""


def _drawn(packing: Packing, draw: Draw) -> tuple[Tensor, dict[str, nn.Parameter]]:
    """The bucket, filled tensor by tensor, and the parameters that are views into it."""
    flat: Tensor | None = None
    for name, start, stop in packing.spans():
        value = draw(name)
        if flat is None:
            flat = torch.zeros(packing.size, dtype=value.dtype, device=value.device)
        flat[start:stop] = value.flatten()
    assert flat is not None, packing
    return flat, {name: nn.Parameter(view) for name, view in packing.views(flat).items()}


class Whole:
    """Parameters that every rank holds; it steps its piece, and the others' come by an all-gather
    after the step.
    """

    on_host = False

    def __init__(self, packing: Packing, draw: Draw) -> None:
        self.packing = packing
        self.flat, self.parameters = _drawn(packing, draw)
        self.flat = self.flat.data
        self.piece = piece(self.flat, packing.shard)
        self._finish: Finish | None = None

    @property
    def lasting(self) -> Tensor:
        """What lives from step to step."""
        return self.flat

    def start_publish(self) -> None:
        """Begin to give every rank what the others have stepped."""
        self._finish = start_gather(self.flat, self.piece, self.packing.shard)

    def publish(self) -> None:
        """Wait for it."""
        if self._finish is not None:
            self._finish()
            self._finish = None


class Unit:
    """Parameters of which a rank keeps its piece; they are whole from `gather` to `free`.

    They are views into one flat buffer whose storage is freed and filled again, so that what
    autograd saved of them is right again too (Zhao et al. 2023, arXiv 2304.11277, section 4). It is
    written through an alias with a version counter of its own: refilling is no change that autograd
    must hear of.
    """

    def __init__(self, packing: Packing, draw: Draw, on_host: bool) -> None:
        self.packing, self.on_host = packing, on_host
        flat, self.parameters = _drawn(packing, draw)
        self.flat = flat.data
        own = piece(self.flat, packing.shard)
        self.piece = to_host(own) if on_host else own.clone()
        self.full_bytes = self.flat.nbytes
        self._finish: Finish | None = None
        self.whole = True
        self.free()

    @property
    def lasting(self) -> Tensor:
        """What lives from step to step."""
        return self.piece

    def start_gather(self) -> None:
        """Begin to make the parameters whole, where they are not."""
        if self.whole:
            return
        self.whole = True
        resize_storage(self.flat, self.full_bytes)
        own = self.piece
        if self.on_host or self.packing.shard.size == 1:
            own = piece(self.flat, self.packing.shard)
            own.copy_(self.piece, non_blocking=True)
        self._finish = start_gather(self.flat, own, self.packing.shard)

    def gather(self) -> None:
        """Make the parameters whole."""
        self.start_gather()
        if self._finish is not None:
            self._finish()
            self._finish = None

    def free(self) -> None:
        """Let go of all but this rank's piece."""
        if self.whole:
            self.gather()
            self.whole = False
            resize_storage(self.flat, 0)
