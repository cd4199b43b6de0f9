"""Gradient and parameter buckets of one plan, as the engine packs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from workbench.costmodel.inputs.adapted_layers import (
    EXPERTS,
    adapted_layer,
    linear_names,
    part_bytes,
)
from workbench.costmodel.inputs.config import stage_homes
from workbench.costmodel.inputs.operator_stages import stage_parts
from workbench.costmodel.inputs.operator_strategies import stage_parameters
from workbench.costmodel.inputs.parameter_tensors import (
    TABLE,
    ParameterTensor,
    adapter_tensors,
    first_tensors,
    layer_tensors,
    norm_tensors,
)
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.inputs.traced_stages import TracedStages
from workbench.runtime_facts.bucket_packing import pack_by_size, pack_by_unit, padded_numel
from workbench.runtime_facts.four_bit_sizes import FourBitFormat

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
    frozen: bool = False
    """Whether it is a frozen weight, beside which adapters train."""
    in_bytes: bool = False
    """Whether its elements are bytes: a part of a weight in 4 bits."""


@dataclass(frozen=True)
class PackedBucket:
    """Tensors side by side in one flat buffer, aligned and padded to equal shards."""

    unit: str
    elements: int
    partial_over: GridSides
    experts: bool
    members: tuple[StageParameter, ...]
    """In the order in which they lie."""
    shards: int
    """Equal shards that ZeRO makes of it; 1: none."""

    @property
    def frozen(self) -> bool:
        """Whether its parameters have no gradients and are never updated."""
        return self.members[0].frozen

    @property
    def in_bytes(self) -> bool:
        """Whether its elements are bytes."""
        return self.members[0].in_bytes


def rank_buckets(w: Workload, pipeline_rank: int) -> list[list[PackedBucket]]:
    """Buckets of every stage of a pipeline rank, in the order in which backward fills them; frozen
    ones behind those that are trained.
    """
    s = w.fixed
    homes = stage_homes(s.pipeline, s.schedule, len(s.partition), s.table).tolist()
    mine = [stage for stage, home in enumerate(homes) if home == pipeline_rank]
    ends = {0, len(homes) - 1}
    both = ends <= set(mine)
    apart = bool(w.zero) and w.shape.tied and not both and not w.fixed.adapter_rank
    return [
        [
            bucket
            for _, own in groupby(sorted(parameters, key=_storage), _storage)
            for bucket in _pack(w, list(own))
        ]
        for parameters in (_parameters(w, stage, len(homes), both, apart) for stage in mine)
    ]


def _storage(parameter: StageParameter) -> tuple[bool, bool]:
    return parameter.frozen, parameter.in_bytes


def _pack(w: Workload, parameters: list[StageParameter]) -> list[PackedBucket]:
    """Buckets by size; under ZeRO-3 one a unit, however large."""
    keys = [(p.partial_over, p.own_bucket, p.experts) for p in parameters]
    if w.zero == 3:
        units = pack_by_unit((p.unit, key) for p, key in zip(parameters, keys))
        return [_bucket(w, [parameters[place] for place in unit]) for unit in units]
    limit = float(w.searched.bucket_bytes / w.gradient_element_bytes)
    backward = parameters[::-1]
    tensors = zip(reversed(keys), (p.elements for p in backward))
    return [_bucket(w, [backward[place] for place in it]) for it in pack_by_size(tensors, limit)]


def _bucket(w: Workload, parameters: list[StageParameter]) -> PackedBucket:
    first, sizes = parameters[0], [p.elements for p in parameters]
    members = tuple(parameters)
    shards = max(1, int(w.searched.shard) // expert_ranks(w, first)) if w.zero else 1
    elements = padded_numel(sizes, shards)
    return PackedBucket(first.unit, elements, first.partial_over, first.experts, members, shards)


def expert_ranks(w: Workload, packed: StageParameter | PackedBucket) -> int:
    """Number of ranks over which experts are spread; 1 of other parameters."""
    return int(w.searched.expert) if packed.experts else 1


def with_replicas_at(w: Workload, place: int) -> Workload:
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
    base_is_frozen = w.fixed.adapter_rank > 0

    def packed(
        unit: str, tensors: Iterable[ParameterTensor], frozen: bool = base_is_frozen
    ) -> Iterator[StageParameter]:
        for t in tensors:
            own = t.experts and bool(w.searched.expert > 1)
            size = round(float(t.elements))
            over = () if frozen else sides[t.role]
            yield StageParameter(unit, size, over, False, own, t.name, frozen=frozen)

    if stage == 0:
        table, *rest = packed("embedding", first_tensors(w))
        yield replace(table, own_bucket=apart and stages > 1)
        yield from rest
    start = sum(partition[:stage])
    of_kind = {is_moe: list(layer_tensors(w, is_moe)) for is_moe in {False, shape.moe is not None}}
    for layer in range(start, start + partition[stage]):
        is_moe = shape.moe is not None and layer >= shape.moe.first_dense
        tensors = [t for t in of_kind[is_moe] if not (w.fixed.four_bit and t.is_linear)]
        yield from packed(str(layer), [t for t in tensors if not t.is_tile])
        for number, tile in enumerate([t for t in tensors if t.is_tile], 1):
            yield from packed(f"{layer}{TILE}{number}", [tile])
        if w.fixed.four_bit is not None:
            yield from _four_bit(w, w.fixed.four_bit, layer, is_moe)
        if base_is_frozen:
            names = adapted_layer(w.fixed, layer).adapted
            yield from packed(str(layer), adapter_tensors(w, names), frozen=False)
    if stage == stages - 1:
        yield from packed("head", norm_tensors(w))
        if not (shape.tied and both):
            yield StageParameter(
                "head", round(float(w.table_params)), sides["matrix"], apart, frozen=base_is_frozen
            )


def _four_bit(
    w: Workload, form: FourBitFormat, layer: int, is_moe: bool
) -> Iterator[StageParameter]:
    """Parts of the weights of a layer's linears, in 4 bits."""
    for name in linear_names(w, is_moe):
        own = name.startswith(EXPERTS) and bool(w.searched.expert > 1)
        for size in part_bytes(w, form, name):
            yield StageParameter(
                str(layer), round(float(size)), experts=own, frozen=True, in_bytes=True
            )


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
