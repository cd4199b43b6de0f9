"""Gradients of which every tensor rank has a part, for it sees other tokens: summed over them once
a step, after data parallelism has reduced and sharded them.

Sequence parallelism (2205.05198) leaves those of norms and output biases so, a 2.5-D grid all that
its depth replicates (2105.14500), an MoE layer its router's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from workbench.costmodel.communication.collective_call import CollectiveCall, gradient_dtype_name
from workbench.costmodel.inputs.adapted_layers import adapted_layers
from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.operator_stages import rank_parameters
from workbench.costmodel.inputs.operator_strategies import RankGrid, group_name
from workbench.costmodel.inputs.parameter_tensors import (
    ParameterTensor,
    adapter_tensors,
    first_tensors,
    layer_tensors,
    norm_tensors,
)
from workbench.costmodel.inputs.rank_workload import Workload

PartialGradients = tuple[str, str, Number, Number]
"""(side of the tensor axis, its link, its ranks, elements whose gradients are partial over it)."""


def partial_gradient_sums(w: Workload) -> list[CollectiveCall]:
    """All-reduces over each side of the tensor axis, on what ZeRO leaves of the gradients: one
    call, or one for each unit of ZeRO-3.
    """
    shard = w.searched.shard if w.zero else 1.0
    units = w.layers + w.has_embedding + w.has_head if w.zero == 3 else 1.0
    found: dict[str, tuple[str, Number, Number]] = {}
    for side, link, ranks, elements in _partial(w):
        before = found[side][2] if side in found else 0.0
        found[side] = link, ranks, before + elements
    return [
        CollectiveCall(
            "tensor",
            "all_reduce",
            ranks,
            gradient_dtype_name(w),
            w.zeros + elements * w.gradient_element_bytes / shard / units,
            units * (elements > 0),
            "REDUCE_GRAD",
            link,
        )
        for link, ranks, elements in found.values()
    ]


def _partial(w: Workload) -> Iterator[PartialGradients]:
    if w.fixed.grid is not None:
        yield from _of_parameters(w, w.fixed.grid)
    elif w.fixed.adapter_rank:
        yield "tensor", "", w.tensor, _of_adapters(w)
    else:
        yield from _of_tensor_ranks(w) if w.fixed.algorithm == "1d" else _of_grid(w)


def _of_parameters(w: Workload, grid: RankGrid) -> Iterator[PartialGradients]:
    """Of modules that shard rows or tokens, each along axes of its own."""
    by_rank = [Counter[int]() for _ in w.places]
    for place, found in zip(w.places, by_rank):
        for p in rank_parameters(w.fixed, place.stage):
            for axis in p.partial_over:
                found[axis] += p.elements
    for axis, ranks in enumerate(grid.sides):
        name = group_name((axis,))
        yield name, name, float(ranks), np.array([float(found[axis]) for found in by_rank])


def _of_tensor_ranks(w: Workload) -> Iterator[PartialGradients]:
    """Of vectors under sequence parallelism, and of what ranks of an MoE layer, or of attention's
    heads, hold alike.
    """
    if np.any(w.searched.sequence):
        yield "tensor", "", w.tensor, w.searched.sequence * _elements(w, "hidden")
    if w.shape.moe is not None or w.shape.qk_norm == "head":
        yield "tensor", "", w.tensor, _elements(w, "partial")


def _of_adapters(w: Workload) -> Array:
    """Elements of what tensor ranks have alike beside their columns or rows of a weight."""
    partial = {"partial": 1.0, "hidden": w.searched.sequence}
    total = w.zeros
    for kind, count in adapted_layers(w):
        for t in adapter_tensors(w, kind.adapted):
            total = total + count * t.elements * partial.get(t.role, 0.0)
    return total


def _of_grid(w: Workload) -> Iterator[PartialGradients]:
    """Of vectors, which the ranks of a column hold alike, and of all that a depth replicates."""
    side, t = w.tiling.hidden_parts, w.tiling
    hidden, others = _elements(w, "hidden"), _elements(w, "vector")
    if w.fixed.algorithm == "3d":
        yield "input", "", side, hidden
        yield "weight", "", side, hidden + others
        yield "output", "", side, others
        return
    yield "row", "", side, hidden + others
    yield "depth", "", t.num_weight_copies, w.param_counts.trained * (t.num_weight_copies > 1)


def _elements(w: Workload, role: str) -> Array:
    """Elements of a rank's tensors of one role."""

    def of(tensors: Iterable[ParameterTensor]) -> Number:
        return sum((t.elements for t in tensors if t.role == role), start=0.0)

    total = w.has_embedding * of(first_tensors(w)) + w.has_head * of(norm_tensors(w))
    total = total + w.dense_layers * of(layer_tensors(w, is_moe=False))
    if w.shape.moe is not None:
        total = total + (w.layers - w.dense_layers) * of(layer_tensors(w, is_moe=True))
    return np.asarray(total)
