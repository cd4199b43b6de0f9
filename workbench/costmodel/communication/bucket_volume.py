"""Gradient and parameter buckets as the engine packs them, and every collective on them: exact,
call by call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from workbench.costmodel.inputs.config import stage_homes
from workbench.costmodel.inputs.operator_stages import stage_parts
from workbench.costmodel.inputs.operator_strategies import stage_parameters
from workbench.costmodel.inputs.parameter_tensors import (
    EMBEDDING_NORM,
    TABLE,
    ParameterTensor,
    first_tensors,
    layer_tensors,
    norm_tensors,
    num_tiles,
)
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.inputs.traced_stages import TracedStages
from workbench.runtime_facts.bucket_packing import pack_by_size, padded_numel
from workbench.runtime_facts.offload_sizes import HostShare

BucketCollective = tuple[str, str, int, str, float, str]
"""(axis, kind, group size, `parameter` or `gradient` dtype, bytes, action)."""


TILE = ".tile"
"""Between the numbers of a layer and of its tile, in the name of the tile's unit."""

GridSides = tuple[tuple[str, int], ...]
"""(name, ranks) of sides of the tensor axis."""


@dataclass(frozen=True)
class StageParameter:
    """One tensor of a stage."""

    unit: str
    """ZeRO-3 unit that it is all-gathered with."""
    elements: int
    partial_over: GridSides = ()
    """Sides of the tensor axis over which its gradient is a partial sum."""
    own_bucket: bool = False
    """Whether it gets a bucket of its own."""
    experts: bool = False
    """Whether it belongs to experts that other ranks do not hold."""
    name: str = ""
    has_gradient: bool = True
    """Whether backward makes its gradient: a user's module may have parameters that it does not
    read.
    """


@dataclass(frozen=True)
class PackedBucket:
    """Tensors side by side in one flat buffer, aligned and padded to equal shards."""

    unit: str
    elements: int
    partial_over: GridSides
    experts: bool
    members: tuple[StageParameter, ...] = ()
    """In the order in which they lie."""


def rank_buckets(w: Workload, pipeline_rank: int) -> list[list[PackedBucket]]:
    """Buckets of every stage of a pipeline rank, in the order in which backward fills them."""
    s = w.fixed
    homes = stage_homes(s.pipeline, s.schedule, len(s.partition), s.table).tolist()
    mine = [stage for stage, home in enumerate(homes) if home == pipeline_rank]
    ends = {0, len(homes) - 1}
    both = ends <= set(mine)
    apart = bool(w.zero) and w.shape.tied and not both
    return [_pack(w, list(_parameters(w, stage, len(homes), both, apart))) for stage in mine]


def _pack(w: Workload, parameters: list[StageParameter]) -> list[PackedBucket]:
    """Buckets by size; under ZeRO-3 one a unit, however large."""
    limit = math.inf
    if w.zero < 3:
        limit = float(w.searched.bucket_bytes / w.gradient_element_bytes)
    backward = parameters[::-1]
    tensors = [
        ((p.unit if w.zero == 3 else "", p.partial_over, p.own_bucket, p.experts), p.elements)
        for p in backward
    ]
    return [_bucket(w, [backward[place] for place in it]) for it in pack_by_size(tensors, limit)]


def _bucket(w: Workload, parameters: list[StageParameter]) -> PackedBucket:
    last, sizes = parameters[-1], [p.elements for p in parameters]
    members = tuple(parameters)
    bucket = PackedBucket(last.unit, sum(sizes), last.partial_over, last.experts, members)
    return replace(bucket, elements=padded_numel(sizes, shard_ranks(w, bucket)))


def _expert_ranks(w: Workload, bucket: PackedBucket) -> int:
    return int(w.searched.expert) if bucket.experts else 1


def shard_ranks(w: Workload, bucket: PackedBucket) -> int:
    """Number of ranks over which ZeRO shards a bucket."""
    return max(1, int(w.searched.shard) // _expert_ranks(w, bucket)) if w.zero else 1


def _replica_ranks(w: Workload, bucket: PackedBucket) -> int:
    """Number of ranks that hold the same bucket."""
    return round(float(w.data * w.searched.context)) // _expert_ranks(w, bucket)


def bucket_collectives(w: Workload, place: int) -> Counter[BucketCollective]:
    """Collectives of gradients and parameters in a step with counts, on the rank at `place` among
    `w.places`.
    """
    found: Counter[BucketCollective] = Counter()
    w = _with_replicas_at(w, place)
    for stage in rank_buckets(w, w.places[place].stage):
        for row, times in _reductions(w, stage):
            found[row] += times
        for row, times in _gathers(w, stage):
            found[row] += times
    return found


def with_offloaded_buckets(w: Workload) -> Workload:
    """`w` of one plan with the share of the optimizer that each rank's host takes in buckets, where
    the plan offloads a part (`data.offload_ratio`).
    """
    ratio = float(w.searched.offload_optimizer)
    if ratio in (0.0, 1.0):
        return w
    shares = []
    for index, place in enumerate(w.places):
        host = HostShare(ratio)
        for stage in rank_buckets(_with_replicas_at(w, index), place.stage):
            for bucket in stage:
                host.takes(bucket.elements)
        shares.append(host.share)
    return replace(w, searched=replace(w.searched, offload_optimizer=np.array(shares)))


def _with_replicas_at(w: Workload, place: int) -> Workload:
    """`w` with the replicas, shards and microbatches of one of its ranks, where stages have
    replicas of their own.
    """
    if not w.fixed.replicas:
        return w
    data, shard, microbatches = (
        float(np.broadcast_to(x, w.zeros.shape)[place])
        for x in (w.data, w.searched.shard, w.microbatches)
    )
    searched = replace(w.searched, shard=shard)
    return replace(w, data=data, microbatches=microbatches, searched=searched)


def _reductions(w: Workload, stage: list[PackedBucket]) -> Iterator[tuple[BucketCollective, int]]:
    hooks = "B" if w.pipeline == 1 else "REDUCE_GRAD"
    times = int(w.microbatches) if w.zero >= 2 and w.reduce_microbatch else 1
    for index, bucket in enumerate(stage):
        if not all(p.has_gradient for p in bucket.members):
            hooks = "REDUCE_GRAD"  # it is never complete, and those behind it wait for it
        size, group, shard = (
            bucket.elements * float(w.gradient_element_bytes),
            _replica_ranks(w, bucket),
            shard_ranks(w, bucket),
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
        for action, times in _gathers_by_action(w, bucket).items():
            size = bucket.elements * float(w.element_bytes)
            yield ("data", "all_gather", shard_ranks(w, bucket), "parameter", size, action), times


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


def _tile_gathers_in_backward(w: Workload, unit: str) -> int:
    """How often one backward all-gathers a tile: twice in a recomputed layer, but for its last
    tiles, which stay from its forward on: half as many as are in flight.
    """
    layer, _, number = unit.partition(TILE)
    stays = num_tiles(w) - int(number) < w.fixed.num_zero_in_flight // 2
    recomputed = int(layer) < w.recomputed_layers[0]  # which ones they are makes no difference
    return 2 if recomputed and not stays else 1


def _partial_sides(w: Workload) -> dict[str, GridSides]:
    """Role of a tensor -> sides of the tensor axis over which its gradient is a partial sum: whose
    ranks hold the same parameter but see different tokens, or have a part of the layer's output.
    """
    matrix, hidden, vector = _grid_sides(w)
    partial: GridSides = (("tensor", int(w.tensor)),) if w.tensor > 1 else ()
    of = {"matrix": matrix, "hidden": hidden, "vector": vector}
    return of | {"partial": partial, "complete": ()}


def _grid_sides(w: Workload) -> tuple[GridSides, GridSides, GridSides]:
    """Sides of the tensor axis whose ranks hold the same parameter but see different tokens: for
    matrices, for vectors of hidden size, for other vectors.
    """
    side = int(w.tiling.hidden_parts)
    if w.fixed.algorithm == "1d":
        whole: GridSides = (
            (("tensor", int(w.tensor)),) if w.searched.sequence and w.tensor > 1 else ()
        )
        return (), whole, ()
    if w.fixed.algorithm == "3d":
        return (), (("input", side), ("weight", side)), (("weight", side), ("output", side))
    depth = (("depth", int(w.tiling.num_weight_copies)),) if w.tiling.num_weight_copies > 1 else ()
    return depth, (("row", side), *depth), (("row", side), *depth)


def _parameters(
    w: Workload, stage: int, stages: int, both: bool, apart: bool
) -> Iterator[StageParameter]:
    """Tensors of a stage, in the model's order."""
    if w.fixed.traced is not None:
        yield from _of_traced(w.fixed.traced, stage, apart)
        return
    if w.fixed.operators is not None:
        yield from _under_operators(w, stage, both, apart)
        return
    shape, partition, sides = w.shape, w.fixed.partition, _partial_sides(w)

    def packed(unit: str, tensors: Iterable[ParameterTensor]) -> Iterator[StageParameter]:
        for t in tensors:
            own = t.experts and bool(w.searched.expert > 1)
            size = round(float(t.elements))
            yield StageParameter(unit, size, sides[t.role], experts=own, name=t.name)

    if stage == 0:
        table, *rest = packed("embedding", first_tensors(w))
        yield replace(table, own_bucket=apart and stages > 1)
        yield from rest
    start = sum(partition[:stage])
    for layer in range(start, start + partition[stage]):
        is_moe = shape.moe is not None and layer >= shape.moe.first_dense
        tensors = list(layer_tensors(w, is_moe))
        yield from packed(str(layer), [t for t in tensors if not t.is_tile])
        for number, tile in enumerate([t for t in tensors if t.is_tile], 1):
            yield from packed(f"{layer}{TILE}{number}", [tile])
    if stage == stages - 1:
        yield from packed("head", norm_tensors(w))
        if not (shape.tied and both):
            yield StageParameter("head", round(float(w.table_params)), sides["matrix"], apart)


def _under_operators(w: Workload, stage: int, both: bool, apart: bool) -> Iterator[StageParameter]:
    """The same where each module is sharded by a strategy of its own."""
    named = w.fixed.operators
    assert named is not None
    parts = stage_parts(w.fixed, stage)
    for p in stage_parameters(named, w.shape, parts.layers, parts.has_embedding, parts.has_head):
        if both and w.shape.tied and p.name == "head.weight":
            continue
        sides = tuple((f"operators.{axis}", named.sides[axis]) for axis in p.partial_over)
        table = p.name in (TABLE, "head.weight")
        experts = p.is_of_experts and named.expert_ranks > 1
        yield StageParameter(p.unit, p.elements, sides, apart and table, experts, p.name)


def _of_traced(traced: TracedStages, stage: int, apart: bool) -> Iterator[StageParameter]:
    """The same of a user's traced module."""
    for p in traced.of_stage(stage):
        sides = tuple((f"operators.{axis}", traced.sides[axis]) for axis in p.partial_over)
        own = apart and p.name == traced.tied
        yield StageParameter(p.unit, p.elements, sides, own, name=p.name, has_gradient=p.is_read)
