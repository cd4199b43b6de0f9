"""The flat buckets of one plan as the engine packs them, and every collective that they make:
exact, by the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from workbench.costmodel.inputs.config import Number, stage_homes
from workbench.costmodel.inputs.rank_workload import Workload

Row = tuple[str, str, int, str, float, str]
"""Axis, kind, group size, dtype (of the parameters, or of the gradients), bytes, action."""


Sides = tuple[tuple[str, int], ...]
"""Name and ranks of sides of the tensor axis."""


@dataclass(frozen=True)
class Parameter:
    """A tensor of a stage: what ZeRO-3 gathers it with, its entries, the tensor sides that hold
    parts of its gradient, whether it stands in a bucket of its own, and whether it is of experts
    that other ranks do not hold.
    """

    unit: str
    elements: int
    partial: Sides = ()
    alone: bool = False
    experts: bool = False


@dataclass(frozen=True)
class Bucket:
    """Tensors side by side, padded to a multiple of the shard group."""

    unit: str
    elements: int
    partial: Sides
    experts: bool


def of_rank(w: Workload, rank: int) -> list[list[Bucket]]:
    """The buckets of every stage of a pipeline rank, in the order of backward."""
    s = w.setting
    homes = stage_homes(s.pipeline, s.schedule, len(s.partition), s.table).tolist()
    mine = [stage for stage, home in enumerate(homes) if home == rank]
    ends = {0, len(homes) - 1}
    both = ends <= set(mine)
    apart = bool(w.zero) and w.shape.tied and not both
    return [_packed(w, list(_parameters(w, stage, len(homes), both, apart))) for stage in mine]


def _packed(w: Workload, parameters: list[Parameter]) -> list[Bucket]:
    limit = w.knobs.bucket_bytes / w.gradient_element
    full: list[Bucket] = []
    open_: dict[object, Bucket] = {}
    for p in reversed(parameters):
        key = (p.unit if w.zero == 3 else "", p.partial, p.alone, p.experts)
        empty = Bucket(p.unit, 0, p.partial, p.experts)
        bucket = open_.get(key, empty)
        if w.zero < 3 and bucket.elements and bucket.elements + p.elements > limit:
            full.append(bucket)
            bucket = empty
        open_[key] = replace(empty, elements=bucket.elements + p.elements)
    return [
        replace(b, elements=_padded(b.elements, _shard(w, b))) for b in (*full, *open_.values())
    ]


def _padded(elements: int, shard: int) -> int:
    return ceil(elements / shard) * shard


def _expert(w: Workload, bucket: Bucket) -> int:
    return int(w.knobs.expert) if bucket.experts else 1


def _shard(w: Workload, bucket: Bucket) -> int:
    """Ranks over which ZeRO shards a bucket."""
    return max(1, int(w.knobs.shard) // _expert(w, bucket)) if w.zero else 1


def _group(w: Workload, bucket: Bucket, rank: int) -> int:
    """Ranks that hold the same bucket as one of pipeline rank `rank`; stages may have unequally
    many.
    """
    replicas = np.broadcast_to(np.ravel(w.data * w.knobs.context), w.setting.pipeline)[rank]
    return round(float(replicas)) // _expert(w, bucket)


def traffic(w: Workload, rank: int) -> Counter[Row]:
    """Every collective of gradients and parameters a step, on a pipeline rank."""
    found: Counter[Row] = Counter()
    for stage in of_rank(w, rank):
        for row, times in _reductions(w, stage, rank):
            found[row] += times
        for row, times in _gathers(w, stage):
            found[row] += times
    return found


def _reductions(w: Workload, stage: list[Bucket], rank: int) -> Iterator[tuple[Row, int]]:
    hooks = "B" if w.pipeline == 1 else "REDUCE_GRAD"
    times = int(w.microbatches) if w.zero >= 2 and w.reduce_microbatch else 1
    for index, bucket in enumerate(stage):
        size, group, shard = (
            bucket.elements * float(w.gradient_element),
            _group(w, bucket, rank),
            _shard(w, bucket),
        )
        yield ("data", "reduce_scatter", shard, "gradient", size, hooks), times
        # The sum over replicas follows when later buckets need the room, and that of the last
        # buckets at the end.
        late = shard > 1 and index > len(stage) - w.setting.in_flight
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
        for _, ranks in bucket.partial:
            yield ("tensor", "all_reduce", ranks, "gradient", size / shard, "REDUCE_GRAD"), 1


def _gathers(w: Workload, stage: list[Bucket]) -> Iterator[tuple[Row, int]]:
    if not w.zero:
        return
    for bucket in stage:
        for action, times in _gathered(w, bucket.unit).items():
            size = bucket.elements * float(w.element)
            yield ("data", "all_gather", _shard(w, bucket), "parameter", size, action), times


def _gathered(w: Workload, unit: str) -> dict[str, int]:
    """Action -> how often in a step a unit is gathered in it.

    Backward needs no table but for a norm behind it, and begins with the last unit, which forward
    has left whole.
    """
    m, norm = int(w.microbatches), bool(w.shape.embedding_norm)
    if w.zero < 3:
        return {"OPTIMIZER": 1}
    if w.knobs.keep_gathered or w.pipeline > 1:
        return {"F": 1}
    if unit == "embedding":
        head = m * int(w.shape.tied)
        return {"F": (1 if norm else m) + head, "B": m if norm and w.shape.tied else int(norm) * m}
    return {"F": m, "B": 0 if unit == "head" else m}


def _sides(w: Workload) -> tuple[Sides, Sides, Sides]:
    """Along which tensor ranks hold the same and meet different tokens: of matrices, of vectors as
    wide as the residual stream, of other vectors.
    """
    side = int(w.tiling.hidden)
    if w.setting.algorithm == "1d":
        whole: Sides = (("tensor", int(w.tensor)),) if w.knobs.sequence and w.tensor > 1 else ()
        return (), whole, ()
    if w.setting.algorithm == "3d":
        return (), (("input", side), ("weight", side)), (("weight", side), ("output", side))
    depth = (("depth", int(w.tiling.copies)),) if w.tiling.copies > 1 else ()
    return depth, (("row", side), *depth), (("row", side), *depth)


def _parameters(
    w: Workload, stage: int, stages: int, both: bool, apart: bool
) -> Iterator[Parameter]:
    """A stage's tensors in the model's order."""
    shape, partition = w.shape, w.setting.partition
    matrix, split, _ = sides = _sides(w)
    table, h = float(w.vocab * w.height), float(shape.hidden * w.tiling.vector)
    norm = [(h, split)] * (2 if shape.norm == "layernorm" else 1)
    if stage == 0:
        alone = apart and stages > 1
        yield Parameter("embedding", round(table), matrix, alone=alone)
        rest = [(shape.max_positions * h, split)] if shape.positions == "learned" else []
        for size, partial in rest + (norm if shape.embedding_norm else []):
            yield Parameter("embedding", round(size), partial)
    start = sum(partition[:stage])
    for layer in range(start, start + partition[stage]):
        mixture = w.shape.moe is not None and layer >= w.shape.moe.first_dense
        dense = () if mixture else _mlp(w, w.ffn, sides)
        for size, partial in [*norm, *_attention(w), *norm, *dense]:
            yield Parameter(str(layer), round(size), partial)
        if mixture:
            yield from _mixture(w, str(layer))
    if stage == stages - 1:
        yield from (Parameter("head", round(size), partial) for size, partial in norm)
        if not (shape.tied and both):
            yield Parameter("head", round(table), matrix, alone=apart)


def _attention(w: Workload) -> Iterator[tuple[float, Sides]]:
    h, biases, (matrix, split, other) = float(w.height), w.shape.biases, _sides(w)
    for width in map(float, (w.q_width, w.k_width, w.v_width)):
        yield h * width, matrix
        if biases in ("qkv", "all"):
            yield width, other
    yield h * float(w.o_width), matrix
    if biases == "all":
        yield float(w.hidden), split


def _mlp(
    w: Workload, width: Number, sides: tuple[Sides, Sides, Sides]
) -> Iterator[tuple[float, Sides]]:
    """Of a feed-forward layer whose local width is `width`."""
    bias, (matrix, split, other) = w.shape.biases == "all", sides
    for _ in range(2 if w.shape.gated else 1):
        yield float(w.height * width), matrix
        if bias:
            yield float(width), other
    yield float(w.height * width), matrix
    if bias:
        yield float(w.hidden), split


def _mixture(w: Workload, unit: str) -> Iterator[Parameter]:
    """Router, experts, shared experts: tensor ranks make parts of the router's gradient, and of
    output biases'.
    """
    moe = w.shape.moe
    assert moe is not None
    parts: Sides = (("tensor", int(w.tensor)),) if w.tensor > 1 else ()
    sides, apart = ((), parts, ()), bool(w.knobs.expert > 1)
    own = moe.experts / w.knobs.expert
    yield Parameter(unit, round(float(w.height * moe.experts)), parts)
    for size, partial in _mlp(w, w.expert_ffn, sides):
        yield Parameter(unit, round(size * own), partial, experts=apart)
    for size, partial in _mlp(w, w.shared_ffn, sides) if moe.shared else ():
        yield Parameter(unit, round(size), partial)
