"""What the host takes of the model states under offload, and what it keeps beside them."""

from __future__ import annotations

from typing import Any

STAGING_BYTES = 32 * 2**20
"""Bytes of each of the two pinned buffers through which parameters are copied to the device: one
is filled while the other is on its way.
"""


def stepped_bytes(gradient: Any, moments: float, target: float, parameter: float) -> Any:
    """Bytes of host memory that the update of one offloaded parameter moves: it reads the gradient,
    reads and writes moments and what it steps, reads that again and writes the rounded parameter
    into a staging buffer. Casts stay in cache.

    Args:
        gradient: Bytes of its gradient; a number or an array.
        moments: Of its moments together.
        target: Of what is stepped: the master weight, or the parameter.
        parameter: Of the parameter on the device.
    """
    return gradient + 2 * (moments + target) + target + parameter


class HostShare:
    """Which buckets' optimizer states the host takes: as many as keep its share of the elements so
    far nearest to `ratio`.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._seen = self._taken = 0

    def takes(self, numel: int) -> bool:
        """Whether the host takes the next bucket, of `numel` elements."""
        self._seen += numel
        taken = self._taken + numel / 2 <= self._ratio * self._seen
        self._taken += numel * taken
        return taken

    @property
    def share(self) -> float:
        """Share of all elements so far that the host has."""
        return self._taken / max(1, self._seen)
