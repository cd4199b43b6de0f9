"""What lies where in flat buckets: some tensors side by side in one, so that few large collectives
carry many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from workbench.parallel.layout import Layout
from workbench.parallel.mesh import Mesh, MeshAxis
from workbench.runtime_facts.bucket_packing import pack_by_size, padded_numel

Sums = Mapping[str, tuple[MeshAxis, ...]]
"""Local name -> the axes over which a parameter's gradient is summed; the last is the one that ZeRO
shards.
"""

PARTS = {
    "replicas": ("shard", "replicate"),
    "expert_replicas": ("expert_shard", "expert_replicate"),
}
"""Axis that ZeRO shards -> (its part that shares out, its part that repeats: hybrid sharding)."""


@dataclass(frozen=True)
class Packing:
    """Tensors side by side in one flat bucket, padded to a multiple of the shard group.

    Rank r of `shard` owns the r-th of the equal pieces; a gradient's piece is summed over
    `replicate`, and at last over `partial`, along which it is partial for another reason.
    """

    shapes: Mapping[str, tuple[int, ...]]
    sharded: str
    shard: MeshAxis
    replicate: MeshAxis
    partial: tuple[MeshAxis, ...]

    @property
    def size(self) -> int:
        """Entries of the bucket, padding included."""
        return padded_numel(sum(map(math.prod, self.shapes.values())), self.shard.size)

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """(name, first entry, one beyond the last) of each tensor."""
        ends = accumulate(map(math.prod, self.shapes.values()))
        for (name, shape), end in zip(self.shapes.items(), ends):
            yield name, end - math.prod(shape), end

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Every tensor, as a view into the whole bucket."""
        return {name: flat[start:end].view(self.shapes[name]) for name, start, end in self.spans()}

    def own(self) -> Iterator[tuple[str, int, int, int]]:
        """(name, its first entry in the bucket, [start, stop) of the tensor) for what lies in this
        rank's piece.
        """
        length = self.size // self.shard.size
        first = self.shard.index * length
        for name, start, end in self.spans():
            low, high = max(start, first), min(end, first + length)
            if low < high:
                yield name, low - first, low - start, high - start

    def own_views(self, piece: Tensor) -> dict[str, Tensor]:
        """What this rank's piece holds of each tensor: one-dimensional, unless nothing is
        sharded.
        """
        if self.shard.size == 1:
            return self.views(piece)
        return {name: piece[at:][: stop - start] for name, at, start, stop in self.own()}

    def own_layouts(self, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
        """Where that lies in the global tensors."""
        if self.shard.size == 1:
            return {name: layouts[name] for name in self.shapes}
        repeats = (PARTS[self.sharded][1],)
        return {
            name: layouts[name].differing(self.sharded, but=repeats).flattened(start, stop)
            for name, _, start, stop in self.own()
        }


def packed(
    names: Iterable[str], layouts: Mapping[str, Layout], sums: Sums, mesh: Mesh, zero: int
) -> Packing:
    """Tensors that are summed alike, in one bucket; without ZeRO nothing is sharded and all axes
    are summed over.
    """
    shapes = {name: layouts[name].local_shape for name in names}
    *partial, last = sums[next(iter(shapes))]
    if zero == 0:
        return Packing(
            shapes, last.name, MeshAxis("", 1, 0, (mesh.rank,), None), last, tuple(partial)
        )
    shard, replicate = (mesh[part] for part in PARTS[last.name])
    return Packing(shapes, last.name, shard, replicate, tuple(partial))


def by_size(
    layouts: Mapping[str, Layout], sums: Sums, limit: float, alone: str | None
) -> Iterator[list[str]]:
    """Names in buckets of at most `limit` entries (a larger tensor stands by itself), in the order
    of backward.

    Those that are summed over different axes never share a bucket, nor does any with `alone`.
    """
    names = list(reversed(list(layouts)))
    tensors = [((sums[n], n == alone), math.prod(layouts[n].local_shape)) for n in names]
    for bucket in pack_by_size(tensors, limit):
        yield [names[place] for place in bucket]


def by_unit(
    names: Iterable[str], sums: Sums, unit_of: Callable[[str], str], alone: str | None
) -> Iterator[list[str]]:
    """Names in a bucket a unit, units in the order of backward; again apart where sums differ, and
    `alone`.
    """
    groups: dict[object, list[str]] = {}
    for name in names:
        groups.setdefault((unit_of(name), sums[name], name == alone), []).append(name)
    yield from reversed(groups.values())
