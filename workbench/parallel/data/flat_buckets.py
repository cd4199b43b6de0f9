"""Flat buckets: which parameters share one flat buffer, and where each lies in it.

A bucket is reduced or gathered by one large collective instead of one for every parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.parallel.layout import Layout
from workbench.parallel.mesh import Mesh, MeshAxis
from workbench.runtime_facts.bucket_packing import (
    aligned_numel,
    pack_by_size,
    pack_by_unit,
    padded_numel,
)

ReductionAxes = Mapping[str, tuple[MeshAxis, ...]]
"""Local parameter name -> the axes over which its gradient is summed. The last one is the axis of
data parallelism, which ZeRO shards.
"""

HYBRID_AXES = {
    "replicas": ("shard", "replicate"),
    "expert_replicas": ("expert_shard", "expert_replicate"),
}
"""Axis of data parallelism -> its (shard, replicate) sub-axes under hybrid sharding (HSDP)."""


@dataclass(frozen=True)
class BucketLayout:
    """Where parameters lie in one flat bucket: each aligned, all padded to equal aligned shards.

    Rank r of `shard_axis` owns the r-th of the equal shards. A gradient's shard is summed over
    `replicate_axis` too (hybrid sharding), and finally over `partial_axes`, along which a gradient
    is partial for another reason than data parallelism (sequence parallelism, for one).
    """

    shapes: Mapping[str, tuple[int, ...]]
    data_axis: str
    """Name of the axis of data parallelism: a key of HYBRID_AXES."""
    shard_axis: MeshAxis
    replicate_axis: MeshAxis
    partial_axes: tuple[MeshAxis, ...]
    dtype: torch.dtype | None = None
    """Where it is not that of all parameters."""

    @property
    def numel(self) -> int:
        """Number of elements of the bucket, padding included."""
        return padded_numel(map(math.prod, self.shapes.values()), self.shard_axis.size)

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """(name, start, stop) of every parameter in the flat bucket."""
        start = 0
        for name, shape in self.shapes.items():
            numel = math.prod(shape)
            yield name, start, start + numel
            start += aligned_numel(numel)

    def padding(self) -> Iterator[slice]:
        """What lies between the parameters, and behind the last one."""
        stops = [stop for _, _, stop in self.spans()]
        starts = [start for _, start, _ in self.spans()][1:]
        for stop, start in zip(stops, [*starts, self.numel]):
            if start > stop:
                yield slice(stop, start)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Every parameter, in its shape, as a view into the unsharded bucket."""
        return {name: flat[start:end].view(self.shapes[name]) for name, start, end in self.spans()}

    def shard_spans(self) -> Iterator[tuple[str, int, int, int]]:
        """(name, offset in the shard, start, stop) of this rank's part of each parameter.

        `start` and `stop` are offsets in the flattened parameter. A shard's bounds need not be
        those of parameters: one can lie in several ranks' shards.
        """
        length = self.numel // self.shard_axis.size
        first = self.shard_axis.index * length
        for name, start, end in self.spans():
            low, high = max(start, first), min(end, first + length)
            if low < high:
                yield name, low - first, low - start, high - start

    def shard_views(self, shard: Tensor) -> dict[str, Tensor]:
        """This rank's part of each parameter, as 1-D views (in full shape if nothing is
        sharded).
        """
        if self.shard_axis.size == 1:
            return self.views(shard)
        return {
            name: shard[offset:][: stop - start] for name, offset, start, stop in self.shard_spans()
        }

    def shard_layouts(self, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
        """Layout of each of `shard_views` in the global tensors."""
        if self.shard_axis.size == 1:
            return {name: layouts[name] for name in self.shapes}
        replicated = (HYBRID_AXES[self.data_axis][1],)
        return {
            name: layouts[name].sharded_over(self.data_axis, but=replicated).flattened(start, stop)
            for name, _, start, stop in self.shard_spans()
        }


def bucket_layout(
    names: Iterable[str], layouts: Mapping[str, Layout], sums: ReductionAxes, mesh: Mesh, zero: int
) -> BucketLayout:
    """The layout of one bucket of parameters of one dtype, whose gradients are summed over the same
    axes.

    Without ZeRO (`zero` 0) nothing is sharded: the shard axis has one rank, and all ranks of data
    parallelism are replicas.
    """
    shapes = {name: layouts[name].local_shape for name in names}
    first = next(iter(shapes))
    *partial, data = sums[first]
    dtype = layouts[first].dtype
    if zero == 0:
        unsharded = MeshAxis("", 1, 0, (mesh.rank,), None)
        return BucketLayout(shapes, data.name, unsharded, data, tuple(partial), dtype)
    shard, replicate = (mesh[name] for name in HYBRID_AXES[data.name])
    return BucketLayout(shapes, data.name, shard, replicate, tuple(partial), dtype)


def buckets_by_size(
    layouts: Mapping[str, Layout], sums: ReductionAxes, max_numel: float, separate: str | None
) -> Iterator[list[str]]:
    """Names of parameters in buckets of at most `max_numel` elements, in the order of backward.

    A larger parameter has a bucket of its own. Parameters of different dtypes, or whose gradients
    are summed over different axes, never share a bucket, and nothing shares one with `separate`.
    """
    # Backward makes gradients in about the reverse order of the modules.
    names = list(reversed(list(layouts)))
    keys = ((layouts[n].dtype, sums[n], n == separate) for n in names)
    tensors = [(key, math.prod(layouts[n].local_shape)) for key, n in zip(keys, names)]
    for bucket in pack_by_size(tensors, max_numel):
        yield [names[index] for index in bucket]


def buckets_by_unit(
    layouts: Mapping[str, Layout],
    sums: ReductionAxes,
    unit_of: Callable[[str], str],
    separate: str | None,
) -> Iterator[list[str]]:
    """Names of parameters in one bucket for each ZeRO-3 unit, in the order of backward.

    As in `buckets_by_size`, a unit has several buckets where dtypes or reduction axes differ, or
    for `separate`.
    """
    own = list(layouts)
    keys = ((unit_of(n), layouts[n].dtype, sums[n], n == separate) for n in own)
    for bucket in pack_by_unit(keys):
        yield [own[index] for index in bucket]
