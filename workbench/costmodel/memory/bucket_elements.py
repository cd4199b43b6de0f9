"""What the buckets of one plan hold, exactly: small ones notice what aligns their tensors and pads
them to equal shards, and which of their tensors are in a rank's shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from workbench.costmodel.communication.packed_buckets import (
    TILE,
    PackedBucket,
    rank_buckets,
    with_replicas_at,
)
from workbench.costmodel.inputs.config import Array
from workbench.costmodel.inputs.packed_parameters import BucketElements
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.runtime_facts.bucket_packing import aligned_numel
from workbench.runtime_facts.offload_sizes import HostShare


def with_packed_buckets(w: Workload) -> Workload:
    """`w` of one plan with what the engine's buckets hold, and the share of them whose optimizer
    states each rank's host takes, where the plan offloads a part (`data.offload_ratio`).
    """
    if not _is_packed(w):
        return w
    ranks = [list(_buckets(w, at)) for at in range(len(w.places))]
    ratio = float(w.searched.offload_optimizer)
    if ratio not in (0.0, 1.0):
        shares = np.array([_host_share(buckets, ratio) for buckets in ranks])
        w = replace(w, searched=replace(w.searched, offload_optimizer=shares))
    return replace(w, in_buckets=_elements(w, ranks))


def _is_packed(w: Workload) -> bool:
    """Whether buckets hold the model's tensors one by one: not those of the prediction of further
    tokens, and of latent attention on a tensor grid.
    """
    on_grid = w.shape.mla and w.fixed.algorithm != "1d"
    unknown = on_grid or w.shape.mtp_layers
    return w.fixed.framework.data_parallel.packs_buckets and not unknown


def _buckets(w: Workload, at: int) -> Iterator[PackedBucket]:
    for stage in rank_buckets(with_replicas_at(w, at), w.places[at].stage):
        yield from stage


def _host_share(buckets: list[PackedBucket], ratio: float) -> float:
    host = HostShare(ratio)
    for bucket in buckets:
        host.takes(bucket.elements)
    return host.share


def _elements(w: Workload, ranks: list[list[PackedBucket]]) -> BucketElements:
    def by_rank(numbers: Iterable[float]) -> Array:
        return np.array([*numbers], dtype=float)

    has_frozen = w.fixed.adapter_rank > 0
    base = [[b for b in own if b.frozen is has_frozen] for own in ranks]
    trained = [[b for b in own if not b.frozen] for own in ranks]
    adapters = trained if has_frozen else [[] for _ in ranks]

    def held(ranks: list[list[PackedBucket]], experts: bool) -> Array:
        return by_rank(
            sum(_elements_in(w, b) for b in own if b.experts == experts) for own in ranks
        )

    return BucketElements(
        dense=held(base, False),
        experts=held(base, True),
        adapters=held(adapters, False),
        expert_adapters=held(adapters, True),
        stepped=by_rank(sum(map(_in_first_shard, own)) for own in trained),
        layer=by_rank(_largest_layer(w, own) for own in ranks),
        trained_layer=by_rank(_largest_layer(w, own) for own in trained),
    )


def _elements_in(w: Workload, bucket: PackedBucket) -> float:
    """Elements of a bucket; of one of bytes, those of the parameters' dtype that take as many."""
    return bucket.elements / (w.element_bytes if bucket.in_bytes else 1)


def _in_first_shard(bucket: PackedBucket) -> int:
    """Elements of tensors that the first rank of a shard group steps."""
    length, start, found = bucket.elements // bucket.shards, 0, 0
    for member in bucket.members:
        found += max(0, min(start + member.elements, length) - start)
        start += aligned_numel(member.elements)
    return found


def _largest_layer(w: Workload, buckets: list[PackedBucket]) -> float:
    """Elements of the largest layer, where its tensors share no bucket with those of others."""
    layers: dict[str, float] = defaultdict(float)
    for bucket in buckets:
        layers[bucket.unit.partition(TILE)[0]] += _elements_in(w, bucket)
    return max((size for unit, size in layers.items() if unit.isdigit()), default=0)
