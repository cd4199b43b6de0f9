"""The space cut into cells: a cell fixes what decides the code path, and holds the rest as arrays
that broadcast.

Nearly everything depends on how a layer is split: that axis is the last, so that inner loops are
long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.costmodel.inputs.config import (
    Array,
    FixedConfig,
    Mask,
    Number,
    SearchedConfig,
    gradient_dtype_bytes,
)
from workbench.costmodel.inputs.rank_workload import Workload, assemble_workload
from workbench.plan.optimizer_state import DTYPE_BYTES
from workbench.plan.rank_placement import RankPlace, axis_strides
from workbench.plan.rules.strategy import tile_rules
from workbench.plan.schedule_table import named_pair_groups
from workbench.plan.stage_partition import balanced
from workbench.planner.framework_limits import framework_limits
from workbench.planner.search.distinct_stages import DistinctStages, distinct_stages
from workbench.planner.search.framework_cells import possible_splits
from workbench.planner.search.layer_splits import LayerSplit, all_splits, split_divides
from workbench.planner.search.search_space import SearchSpace

KNOB_AXES = (
    "kernels",
    "bucket_mib",
    "gradient",
    "overlap",
    "keep_gathered",
    "reduce",
    "offload",
    "shard",
    "recompute",
    "placement",
    "split",
)
"""Knobs of a cell, in the order of its axes."""
NON_NUMERIC_KNOBS = ("kernels", "gradient", "recompute", "placement", "split")
AS_OFFLOADED = "as offloaded"
"""Of `reduce`: every microbatch where gradients are offloaded, once a step where they stay."""
WORD_VALUES = {
    "none": 0.0,
    "optimizer": 1.0,
    "parameters": 2.0,
    "step": 0.0,
    "microbatch": 1.0,
    AS_OFFLOADED: 2.0,
    "all": 0.0,
}
"""What words count as where a knob is a number."""

CELL_FIELDS = (
    "world_size",
    "gpus_per_node",
    "pipeline",
    "schedule",
    "chunks",
    "partition",
    "zero",
    "tile_factor",
    "algorithm",
)
"""What all candidates of a cell share and a search decides."""

Index = dict[str, NDArray[np.int64]]
"""Axis -> places in its values; arrays that broadcast against each other. An axis that is absent
has one value.
"""


@dataclass(frozen=True)
class Cell:
    """Candidates that share GPUs, schedule, ZeRO stage and tiles: every combination of `values`."""

    fixed: FixedConfig
    values: dict[str, tuple[Any, ...]]
    stages: DistinctStages
    table: Array
    """The splits as numbers: a row a knob. Cells of the same schedule and splits share it."""

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis."""
        return tuple(len(self.values[axis]) for axis in KNOB_AXES)

    @property
    def size(self) -> int:
        """Combinations, legal or not."""
        return int(np.prod(self.shape))

    def choice(self, at: int) -> dict[str, Any]:
        """The knobs of combination number `at`, by name."""
        s = self.fixed
        fixed = {name: getattr(s, name) for name in CELL_FIELDS}
        at_axis = {
            axis: self.values[axis][i]
            for axis, i in zip(KNOB_AXES, np.unravel_index(at, self.shape))
        }
        if at_axis["reduce"] == AS_OFFLOADED:
            at_axis["reduce"] = "step" if at_axis["offload"] == "none" else "microbatch"
        split: LayerSplit = at_axis.pop("split")
        return fixed | split._asdict() | {"tensor": split.size(s.algorithm)} | at_axis

    def with_splits(self, kept: NDArray[np.bool_]) -> Cell:
        """The same cell with some of its splits."""
        splits = tuple(split for split, keep in zip(self.values["split"], kept) if keep)
        return replace(self, values=self.values | {"split": splits}, table=self.table[:, kept])

    def with_tiles(self, factor: int) -> Cell:
        """The same combinations with linears in so many tiles."""
        return replace(self, fixed=replace(self.fixed, tile_factor=factor))

    def grid(self) -> Index:
        """Every combination: each axis of several values along a dimension of its own."""
        long = [(axis, len(self.values[axis])) for axis in KNOB_AXES if len(self.values[axis]) > 1]
        return {
            axis: np.arange(length).reshape([length if place == i else 1 for i in range(len(long))])
            for place, (axis, length) in enumerate(long)
        }

    def workload(self, index: Index) -> Workload:
        """What the combinations ask of a rank."""
        dims = max((places.ndim for places in index.values()), default=0)
        rows = self.stages.ranks
        columns: list[Any] = [_values_at(row, index.get("split")) for row in self.table]
        split: Any = LayerSplit(*columns)
        take = {
            axis: self._take(axis, index) for axis in KNOB_AXES if axis not in NON_NUMERIC_KNOBS
        }
        group, replicas = take["shard"], self._replicas(split.tensor)
        offloads = np.minimum(take["offload"], 1)
        recompute = index.get("recompute", np.zeros((), dtype=int))
        again = (-1, *(1,) * (dims - recompute.ndim), *recompute.shape)
        knobs = SearchedConfig(
            tensor=split.tensor,
            context=split.context,
            expert=split.expert,
            grid=(split.side, split.depth),
            micro_batch=split.micro_batch,
            sequence=split.sequence,
            shard=np.where(group == 0, replicas, group),
            offload_optimizer=offloads,
            offload_parameters=np.maximum(take["offload"] - 1, 0),
            reduce_microbatch=np.where(take["reduce"] == 2, offloads, take["reduce"]),
            keep_gathered=take["keep_gathered"],
            overlap=take["overlap"],
            bucket_bytes=take["bucket_mib"] * 2**20,
            gradient_element_bytes=self._gradients(index),
            selective=_values_at(
                np.array([kind == "selective" for kind in self.values["recompute"]], float),
                recompute,
            ),
            recomputed_layers=self.stages.recomputed[:, recompute.ravel()].reshape(again),
            layers_after_recomputed=self.stages.layers_after[:, recompute.ravel()].reshape(again),
            strides=self._strides(index, self._sizes(split.tensor, split.context)),
        )
        return assemble_workload(
            self.fixed, knobs, [RankPlace(int(rank)) for rank in rows], self.stages.alike
        )

    def is_own_plan(self, w: Workload, index: Index) -> Mask:
        """Whether each combination is legal, and the only one of those that do the same."""
        k = w.searched
        sizes = self._sizes(k.tensor, k.context)
        legal = self._legal(w, self._take("shard", index), self._replicas(k.tensor))
        return legal & self._own_order(sizes, k.strides, index)

    def _replicas(self, tensor: Number) -> Number:
        return self.fixed.world_size / (tensor * self.fixed.pipeline)

    def _sizes(self, tensor: Number, context: Number) -> dict[str, Number]:
        return {
            "tensor": tensor,
            "context": context,
            "data": self._replicas(tensor) / context,
            "pipeline": self.fixed.pipeline,
        }

    def _take(self, axis: str, index: Index) -> Number:
        return _values_at(
            np.array([float(WORD_VALUES.get(value, value)) for value in self.values[axis]]),
            index.get(axis),
        )

    def _gradients(self, index: Index) -> Number:
        parameter = DTYPE_BYTES[self.fixed.precision]
        sizes = np.array(
            [float(gradient_dtype_bytes(dtype, parameter)) for dtype in self.values["gradient"]]
        )
        return _values_at(sizes, index.get("gradient"))

    def _strides(self, index: Index, sizes: dict[str, Number]) -> dict[str, Number]:
        each = [axis_strides(list(order), sizes) for order in self.values["placement"]]
        if len(each) == 1:
            return each[0]
        return {axis: np.choose(index["placement"], [one[axis] for one in each]) for axis in sizes}

    def _legal(self, w: Workload, group: Number, replicas: Number) -> Mask:
        """Whether each combination is a legal plan, and the only one of those that do the same."""
        good: Mask = np.True_
        k = w.searched
        if self.fixed.zero:  # over one replica there is nothing to shard, but something to offload
            gradients = k.offload_optimizer * k.reduce_microbatch
            least = {1: k.offload_optimizer, 2: gradients, 3: k.offload_parameters}
            good = (replicas > 1) | (np.asarray(least[self.fixed.zero]) > 0)
        if any(size != "all" for size in self.values["shard"]):
            good = good & (
                (group == 0) | ((replicas % np.maximum(group, 1) == 0) & (group < replicas))
            )
        if "microbatch" in self.values["reduce"]:
            several = (w.microbatches > 1) | (k.offload_optimizer > 0)
            good = good & ((k.reduce_microbatch == 0) | several)
        return good

    def _own_order(self, sizes: dict[str, Number], found: dict[str, Number], index: Index) -> Mask:
        """False where an earlier placement puts all axes of several ranks as this one does."""
        if len(self.values["placement"]) == 1 or index["placement"].ndim == 1:
            return np.True_
        along = int(np.argmax(index["placement"].shape))
        axes = [np.where(sizes[axis] > 1, stride, 0) for axis, stride in found.items()]
        shape = np.broadcast_shapes(index["placement"].shape, *map(np.shape, axes))
        axes = [np.moveaxis(np.broadcast_to(x, shape), along, 0) for x in axes]
        own = [np.True_]
        for later in range(1, len(self.values["placement"])):
            same = [
                np.logical_and.reduce([x[later] == x[earlier] for x in axes])
                for earlier in range(later)
            ]
            own.append(~np.logical_or.reduce(same))
        return np.moveaxis(np.array(np.broadcast_arrays(*own)), 0, along)


def _values_at(values: Array, index: NDArray[np.int64] | None) -> Number:
    return (
        float(values[0])
        if index is None or (index.ndim == 0 and len(values) == 1)
        else values[index]
    )


def search_cells(space: SearchSpace) -> Iterator[Cell]:
    """Every cell of a space that has candidates; knobs that change nothing in it have one value
    there.
    """
    if () in vars(space).values():  # conditions left a knob no value
        return
    for setting in space.fixed_configs:
        for schedule, chunks, pipeline in space.schedules:
            if setting.world_size % pipeline:
                continue
            partition = tuple(balanced(setting.shape, pipeline * chunks, setting.sequence_length))
            fixed = replace(
                setting,
                schedule=schedule,
                chunks=chunks,
                pipeline=pipeline,
                partition=partition,
                pair_groups=named_pair_groups(schedule, pipeline, setting.transport),
                has_context_parallel=max(space.context) > 1,
            )
            stages = distinct_stages(fixed, space.recompute)
            for algorithm in space.algorithm:
                own = replace(fixed, algorithm=algorithm)
                if splits := tuple(
                    split for split in all_splits(space, algorithm) if split_divides(own, split)
                ):
                    yield from _cells_of_splits(space, own, splits, stages)


def _cells_of_splits(
    space: SearchSpace, fixed: FixedConfig, splits: tuple[LayerSplit, ...], stages: DistinctStages
) -> Iterator[Cell]:
    """One for each ZeRO stage, number of tiles and kind of kernels, which change what is held."""
    limits, placements = framework_limits(fixed.stack), _distinct_placements(space, fixed)
    former: Cell | None = None
    for zero, tiles in product(space.zero, space.tile_factor):
        tiled = splits if tiles == 1 else splits_of_tiles(zero, fixed.pipeline, splits)
        for kernels in space.kernels if tiled else ():
            own = replace(fixed, zero=zero, kernels=kernels, tile_factor=tiles)
            can = possible_splits(own, tiled, limits)
            if not can:
                continue
            alone = {"kernels": (kernels,), "split": can, "placement": placements}
            values = alone | _knob_values(space, own)
            if all(values.values()):
                alike = former is not None and former.values["split"] == can
                table = former.table if former and alike else np.array(can, dtype=float).T
                yield (former := Cell(own, values, stages, table))


def splits_of_tiles(
    zero: int, pipeline: int, splits: tuple[LayerSplit, ...]
) -> tuple[LayerSplit, ...]:
    """Those beside which linears may be computed by tiles."""
    legal = tile_rules.BESIDE
    may = (zero, pipeline) == (legal["zero"], legal["pipeline"])
    return tuple(split for split in splits if may and split.tensor == legal["tensor"])


OFFLOAD_BY_ZERO = {
    0: ("none",),
    1: ("none", "optimizer"),
    2: ("none", "optimizer"),
    3: ("none", "optimizer", "parameters"),
}
"""ZeRO stage -> what it can offload."""


def _knob_values(space: SearchSpace, s: FixedConfig) -> dict[str, tuple[Any, ...]]:
    """Values of the other axes; none where conditions ask for what this ZeRO stage or schedule does
    not have.
    """

    def only(knob: str, legal: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(value for value in getattr(space, knob) if value in legal)

    gathered = s.zero == 3 and s.pipeline == 1 and s.tile_factor == 1
    reduced = only("reduce", ("step",)) if s.zero < 2 else space.reduce
    if len(reduced) > 1 and space.reduce_as_offloaded:
        reduced = (AS_OFFLOADED,)
    return {
        "recompute": space.recompute,
        "shard": space.shard if s.zero else only("shard", ("all",)),
        "offload": only("offload", OFFLOAD_BY_ZERO[s.zero]),
        "reduce": reduced,
        "keep_gathered": space.keep_gathered if gathered else only("keep_gathered", (False,)),
        "overlap": space.overlap if s.zero == 3 or s.pipeline == 1 else space.overlap[:1],
        "bucket_mib": space.bucket_mib if s.zero < 3 else space.bucket_mib[:1],
        "gradient": space.gradient if DTYPE_BYTES[s.precision] < 4 else space.gradient[:1],
    }


def _distinct_placements(space: SearchSpace, s: FixedConfig) -> tuple[tuple[str, ...], ...]:
    """Placements that differ in the order of axes that may be longer than one rank."""
    long = (
        {"tensor", "data"}
        | ({"context"} if s.has_context_parallel else set())
        | ({"pipeline"} if s.pipeline > 1 else set())
    )
    orders = {
        tuple(axis for axis in order if axis in long): order for order in reversed(space.placement)
    }
    return tuple(reversed(orders.values()))
