"""What the host takes of the model states under offload, and what it keeps beside them."""

STAGING_BYTES = 32 * 2**20
"""Bytes of each of the two pinned buffers through which parameters are copied to the device: one
is filled while the other is on its way.
"""


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
