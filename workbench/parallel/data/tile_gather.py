"""When the tiles of linears are all-gathered, prefetched and resharded (ZeRO-Infinity, 2104.07857,
section 5.1.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby, takewhile

from torch import nn

from workbench.parallel.data.sharded_params import ShardedParams
from workbench.parallel.data.tiled_linear import TiledLinear


class TileGatherer:
    """Keeps one tile unsharded while a linear computes with it, and those that are next in flight.

    Between forward and backward no tile is unsharded.

    Args:
        model: A stage.
        linears: Its tiled linears, in the order of forward.
        buckets: Of each tile, by the id of its parameter.
        num_prefetch: Tiles in flight beside the one in use.
    """

    def __init__(
        self,
        model: nn.Module,
        linears: list[TiledLinear],
        buckets: Mapping[int, ShardedParams],
        num_prefetch: int,
    ) -> None:
        self._buckets, self._num_prefetch = buckets, num_prefetch
        forward = [tile for linear in linears for tile in linear.weight]
        uses = [*forward, None, *_backward_order(linears), None]
        self._uses = [None if tile is None else buckets[id(tile)] for tile in uses]
        self._backward = len(forward) + 1
        self._next = 0
        """Which of `_uses` comes next."""
        model.register_forward_pre_hook(self._restart)

    def _restart(self, *_: object) -> None:
        self._next = 0

    @contextmanager
    def gathered(self, tile: nn.Parameter) -> Iterator[None]:
        """Inside, `tile` is unsharded, and the next ones are on their way."""
        bucket = self._buckets[id(tile)]
        if self._uses[self._next] is None:
            self._next = self._backward
        assert self._uses[self._next] is bucket, "tiles are used in another order than is known"
        self._next += 1
        window = self._uses[self._next :][: self._num_prefetch]
        ahead = [each for each in takewhile(lambda each: each is not None, window) if each]
        for each in (bucket, *ahead):
            each.start_unshard()
        bucket.unshard()
        yield
        if bucket not in ahead:
            bucket.reshard()


def _backward_order(linears: list[TiledLinear]) -> Iterator[nn.Parameter]:
    """Tiles as backward uses them: what is recomputed is used in the order of forward before."""
    for recomputed_in, region in groupby(reversed(linears), key=lambda each: each.recomputed_in):
        tiles = [tile for linear in region for tile in reversed(list(linear.weight))]
        yield from reversed(tiles) if recomputed_in else ()
        yield from tiles
