"""The range of a sharded dim that a tensor-parallel rank holds: even, or by whole attention
heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.parallel.layout import Layout
from workbench.parallel.mesh import MeshAxis
from workbench.plan.model.head_split import head_shard
from workbench.plan.model.model_shape import Shape


@dataclass(frozen=True)
class ShardRange:
    """Elements [start, stop) of a dim, in a local size that may have padding, which stays zero.

    Attributes:
        axis: That shards the dim.
        num_local: Local size of the dim, padding included.
        shard: Which of `num_shards` different shards this is.
        num_shards: Fewer than ranks where several hold the same (GQA's key-value heads).
    """

    axis: MeshAxis
    start: int
    stop: int
    num_local: int
    shard: int
    num_shards: int

    @classmethod
    def even(cls, length: int, axis: MeshAxis, multiple: int = 1) -> ShardRange:
        """Equal shards, each a multiple of `multiple`, the last ones padded."""
        num_local = -(-length // (axis.size * multiple)) * multiple
        start, stop = (min((axis.index + n) * num_local, length) for n in (0, 1))
        return cls(axis, start, stop, num_local, axis.index, axis.size)

    @classmethod
    def heads(cls, name: str, shape: Shape, axis: MeshAxis) -> ShardRange:
        """Whole heads of attention's projection `name` (q, k, v or o; of latent attention q, kv_up
        or o), padded where uneven.
        """
        deal, width = head_shard(shape, axis.size, axis.index), _head_width(name, shape)
        if name in ("q", "o"):
            start, stop = deal.query
            num_local, shard, num_shards = deal.num_q_heads, axis.index, axis.size
        else:
            start, stop = deal.kv
            num_local, shard, num_shards = deal.num_kv_heads, deal.kv_shard, deal.num_kv_shards
        return cls(axis, start * width, stop * width, num_local * width, shard, num_shards)

    @property
    def num_real(self) -> int:
        """Number of elements without padding."""
        return self.stop - self.start

    def apply(self, layout: Layout, dim: int) -> Layout:
        """The layout sharded along `dim`."""
        shared, ranks_per_shard = (
            self.num_shards < self.axis.size,
            self.axis.size // self.num_shards,
        )
        replica = shared and self.num_real > 0 and self.axis.index % ranks_per_shard > 0
        return layout.split_at(dim, self.axis, (self.start, self.stop), self.num_local, replica)


def _head_width(name: str, shape: Shape) -> int:
    """Entries of a head that projection `name` has."""
    if shape.mla is None:
        return shape.query_dim
    keys_values = shape.mla.nope_dim + shape.mla.value_dim
    return {"q": shape.query_dim, "kv_up": keys_values, "o": shape.mla.value_dim}[name]
