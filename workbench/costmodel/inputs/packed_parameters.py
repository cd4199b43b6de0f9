"""Parameter counts of a rank with what aligns its tensors in the engine's buckets, which small ones
notice: a vector of 32 elements takes 64.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.parameter_tensors import (
    ParameterTensor,
    first_tensors,
    layer_tensors,
    norm_tensors,
)
from workbench.costmodel.inputs.rank_parameters import ParamCounts, params_on_shapes
from workbench.costmodel.inputs.rank_shapes import RankShapes
from workbench.runtime_facts.bucket_packing import ALIGNED_NUMEL, aligned_numel


@dataclass(frozen=True)
class BucketElements:
    """Elements of one plan's buckets, by rank."""

    dense: Array
    """Of all buckets but those of experts, padding included, and of adapters."""
    experts: Array
    adapters: Array
    expert_adapters: Array
    stepped: Array
    """What the first rank of a shard group steps: padding has no moments."""
    layer: Array
    """Of the buckets of the largest layer under ZeRO-3."""
    trained_layer: Array
    """The same of what has gradients."""

    def of(self, ranks: NDArray[np.int64]) -> BucketElements:
        """Those of some ranks, which may be named several times."""
        columns = (getattr(self, field.name) for field in fields(self))
        return BucketElements(*(column[ranks] for column in columns))


def packed_params(w: RankShapes, own: ParamCounts, exact: BucketElements | None) -> ParamCounts:
    """`own` parameters with the padding behind each of them, of one plan with that of each bucket.

    Args:
        w: Problem sizes of ranks.
        own: Their parameters.
        exact: What the buckets hold; None of many candidates, whose padding of buckets to equal
            shards, less than 64 elements of a shard, is left out.
    """
    aligned = _aligned_params(w, own)
    if exact is None:
        return aligned
    units = aligned.layer, aligned.trained_layer
    if w.zero == 3:
        units = exact.layer, exact.trained_layer
    counts = exact.dense, exact.experts, units[0], exact.adapters, exact.expert_adapters, units[1]
    return ParamCounts(*counts, frozen=own.frozen)


def _aligned_params(w: RankShapes, own: ParamCounts) -> ParamCounts:
    if not w.fixed.framework.data_parallel.packs_buckets:
        return own
    if w.fixed.grid is not None:
        return params_on_shapes(w, aligned_numel)
    dense = layer = _padding(layer_tensors(w, is_moe=False))
    if w.shape.moe is not None:
        layer = _padding(layer_tensors(w, is_moe=True))
    layers = w.dense_layers * dense + (w.layers - w.dense_layers) * layer
    unit = own.layer + layer
    trained = own.trained_layer if own.frozen else unit
    return replace(own, dense=own.dense + layers + _ends(w), layer=unit, trained_layer=trained)


def _ends(w: RankShapes) -> Number:
    head = _padding([ParameterTensor(w.head_params, "matrix")])
    head = head * (1.0 - w.has_embedding * float(w.shape.tied))
    last = head + _padding(norm_tensors(w))
    return w.has_embedding * _padding(first_tensors(w)) + w.has_head * last


def _padding(tensors: Iterable[ParameterTensor]) -> Number:
    """Elements behind tensors up to their next aligned places."""
    return sum((-tensor.elements % ALIGNED_NUMEL for tensor in tensors), start=0.0)
