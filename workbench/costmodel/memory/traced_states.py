"""Model states of a user's traced module: its parameters may be small, so that what aligns them in
buckets, and which of them are in a rank's shard, counts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workbench.costmodel.communication.bucket_volume import PackedBucket, rank_buckets, shard_ranks
from workbench.costmodel.inputs.config import Array
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.runtime_facts.bucket_packing import aligned_numel


def bucket_elements(w: Workload) -> Array:
    """Elements of all buckets of each rank, padding included."""
    return np.array(
        [float(sum(b.elements for b in _buckets(w, at))) for at in range(len(w.places))]
    )


def owned_elements(w: Workload) -> Array:
    """Elements that each of the first ranks of a shard group steps: padding has no moments."""
    return np.array(
        [float(sum(_in_first_shard(w, b) for b in _buckets(w, at))) for at in range(len(w.places))]
    )


def _buckets(w: Workload, at: int) -> Iterator[PackedBucket]:
    for stage in rank_buckets(w, w.places[at].stage):
        yield from stage


def _in_first_shard(w: Workload, bucket: PackedBucket) -> int:
    length = bucket.elements // shard_ranks(w, bucket)
    start, found = 0, 0
    for member in bucket.members:
        found += max(0, min(start + member.elements, length) - start)
        start += aligned_numel(member.elements)
    return found
