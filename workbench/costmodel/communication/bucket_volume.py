"""Every collective on gradient and parameter buckets, call by call, as the engine packs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from workbench.costmodel.communication.collective_call import REFERENCE
from workbench.costmodel.communication.packed_buckets import (
    TILE,
    PackedBucket,
    expert_ranks,
    rank_buckets,
    with_replicas_at,
)
from workbench.costmodel.inputs.config import stage_homes
from workbench.costmodel.inputs.parameter_tensors import EMBEDDING_NORM, TABLE, num_tiles
from workbench.costmodel.inputs.rank_workload import Workload

EMBEDDING_PLACE = -1
"""Place of the embedding among layers, by their indices."""
BucketCollective = tuple[str, str, int, str, float, str]
"""(axis, kind, group size, dtype, or `parameter` or `gradient` for theirs, bytes, action)."""


def _replica_ranks(w: Workload, bucket: PackedBucket) -> int:
    """Number of ranks that hold the same bucket."""
    return round(float(w.data * w.searched.context)) // expert_ranks(w, bucket)


def bucket_collectives(w: Workload, place: int) -> Counter[BucketCollective]:
    """Collectives of gradients and parameters in a step with counts, on the rank at `place` among
    `w.places`.
    """
    found: Counter[BucketCollective] = Counter()
    w = with_replicas_at(w, place)
    for stage in rank_buckets(w, w.places[place].stage):
        for row, times in _reductions(w, stage):
            found[row] += times
        for row, times in _gathers(w, stage):
            found[row] += times
    return found


def _reductions(w: Workload, stage: list[PackedBucket]) -> Iterator[tuple[BucketCollective, int]]:
    stage = [bucket for bucket in stage if not bucket.frozen]
    hooks = "B" if w.pipeline == 1 else "REDUCE_GRAD"
    times = int(w.microbatches) if w.zero >= 2 and w.reduce_microbatch else 1
    for index, bucket in enumerate(stage):
        if not all(p.has_gradient for p in bucket.members):
            hooks = "REDUCE_GRAD"  # it is never complete, and those behind it wait for it
        size, group, shard = (
            bucket.elements * float(w.gradient_element_bytes),
            _replica_ranks(w, bucket),
            bucket.shards,
        )
        yield ("data", "reduce_scatter", shard, "gradient", size, hooks), times
        # The all-reduce over replicas waits until a later bucket needs the buffer; for the last
        # buckets it waits until the end of backward.
        late = shard > 1 and index > len(stage) - w.fixed.num_zero_in_flight
        yield (
            (
                "data",
                "all_reduce",
                group // shard,
                "gradient",
                size / shard,
                "REDUCE_GRAD" if late else hooks,
            ),
            1,
        )
        for _, ranks in bucket.partial_over:
            yield ("tensor", "all_reduce", ranks, "gradient", size / shard, "REDUCE_GRAD"), 1


def _gathers(w: Workload, stage: list[PackedBucket]) -> Iterator[tuple[BucketCollective, int]]:
    if not w.zero:
        return
    for bucket in stage:
        gathers = _frozen_model_gathers if w.fixed.adapter_rank else _gathers_by_action
        for action, times in gathers(w, bucket).items():
            dtype, element = ("uint8", 1) if bucket.in_bytes else ("parameter", w.element_bytes)
            size = bucket.elements * float(element)
            yield ("data", "all_gather", bucket.shards, dtype, size, action), times


def _gathers_by_action(w: Workload, bucket: PackedBucket) -> dict[str, int]:
    """Action -> how often a step all-gathers a bucket in it.

    Backward does not need the embedding table, except for a norm behind it. It begins with the
    last unit, which forward has left unsharded. A tied head needs the table, and what lies beside
    it.
    """
    m = int(w.microbatches)
    if w.zero < 3:
        return {"OPTIMIZER": 1}
    if w.searched.keep_gathered or w.pipeline > 1 or w.fixed.traced is not None:
        return {"F": 1}
    if bucket.unit == "embedding":
        names = [p.name for p in bucket.members]
        norm = any(name.startswith(EMBEDDING_NORM) for name in names)
        head = m * int(w.shape.tied and TABLE in names)
        return {"F": (1 if norm else m) + head, "B": int(norm) * m}
    if TILE in bucket.unit:
        return {"F": m, "B": m * _tile_gathers_in_backward(w, bucket.unit)}
    return {"F": m, "B": 0 if bucket.unit == "head" else m}


def _frozen_model_gathers(w: Workload, bucket: PackedBucket) -> dict[str, int]:
    """The same of a model whose adapters alone are trained, and of a preference's reference, whose
    forwards leave nothing gathered.
    """
    m = int(w.microbatches)
    found = _gathers_beside_adapters(w, bucket)
    if w.zero == 3 and w.fixed.reference_pass:
        found[REFERENCE] = m * (1 + _is_of_tied_ends(w, bucket))
    return found


def _is_of_tied_ends(w: Workload, bucket: PackedBucket) -> bool:
    """Whether embedding and head of one rank both read a bucket."""
    s = w.fixed
    homes = stage_homes(s.pipeline, s.schedule, len(s.partition), s.table)
    both = bool(homes[0] == homes[-1])
    return w.shape.tied and both and any(p.name == TABLE for p in bucket.members)


def _gathers_beside_adapters(w: Workload, bucket: PackedBucket) -> dict[str, int]:
    """Those of training passes and the optimizer.

    Nothing updates a frozen bucket. Backward ends with the first layer that has an adapter; it and
    those that are prefetched in front of it stay gathered for the next forward.
    """
    m = int(w.microbatches)
    if w.zero < 3:
        return {} if bucket.frozen else {"OPTIMIZER": 1}
    if w.searched.keep_gathered or w.pipeline > 1:
        return {"F": 1}
    first = next(layer for layer, names in enumerate(w.fixed.adapted) if names)
    ahead = first - (w.fixed.num_zero_in_flight - 1)
    if bucket.unit == "head":
        return {"F": m, "B": 0}
    if bucket.unit == "embedding":
        has_norm = any(p.name.startswith(EMBEDDING_NORM) for p in bucket.members)
        read = has_norm and ahead <= EMBEDDING_PLACE
        head = m * _is_of_tied_ends(w, bucket)
        return {"F": (1 if read else m) + head, "B": int(read) * m}
    layer = int(bucket.unit)
    if layer < ahead:
        return {"F": m, "B": 0}
    return {"F": 1 if layer <= first else m, "B": m}


def _tile_gathers_in_backward(w: Workload, unit: str) -> int:
    """How often one backward all-gathers a tile: twice in a recomputed layer, but for its last
    tiles, which stay from its forward on: half as many as are in flight.
    """
    layer, _, number = unit.partition(TILE)
    stays = num_tiles(w) - int(number) < w.fixed.num_zero_in_flight // 2
    recomputed = int(layer) < w.recomputed_layers[0]  # which ones they are makes no difference
    return 2 if recomputed and not stays else 1
