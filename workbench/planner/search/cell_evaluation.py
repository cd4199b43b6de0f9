"""Memory and time of all candidates of a cell at once: memory first, for it is cheaper, and no time
for ways to cut a layer of which nothing fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.costmodel.communication.collective_call import CollectiveCall
from workbench.costmodel.communication.collective_volume import step_collectives
from workbench.costmodel.inputs.config import Array
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.peak_memory import largest_peaks
from workbench.costmodel.rates.constants import Constants
from workbench.costmodel.step_time import longest_compute_seconds, step_time
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.search.cells import Cell, Index
from workbench.planner.search.layer_costs import SplitLayerTimes, layer_times_by_division
from workbench.planner.search.search_space import SearchSpace, plan_on_gpus

WORTH_CUTTING = 0.9
"""Largest share of splits that are left for which a smaller cell is worth assembling."""


@dataclass(frozen=True)
class CellMemory:
    """What the combinations of a cell hold; arrays broadcast to `shape`."""

    cell: Cell
    index: Index
    workload: Workload
    legal: NDArray[np.bool_]
    """Whether each is a plan of its own."""
    peak: Array
    """Largest peak over all pipeline ranks, bytes."""
    hosted: NDArray[np.bool_]
    """Whether the host's memory holds what each offloads."""
    shared: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What cells have in common that differ in their kernels alone, once one has computed it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all combinations."""
        index = self.index
        return np.broadcast_shapes(*(at.shape for at in index.values())) if index else (1,)

    def fitting(self, most: float) -> NDArray[np.bool_]:
        """Legal combinations whose GPUs need no more than `most` bytes, on a host that holds the
        rest.
        """
        return np.asarray(self.legal & self.hosted & (self.peak <= most))

    def count(self, which: NDArray[np.bool_]) -> int:
        """Combinations that `which`, of a shape that broadcasts, is true of."""
        return int(np.count_nonzero(which)) * (math.prod(self.shape) // max(1, np.size(which)))

    def with_fitting_splits(self, fits: NDArray[np.bool_]) -> CellMemory:
        """The same of a cell that has only the splits of which some combination `fits`."""
        splits = self.cell.values["split"]
        if len(splits) < 3 or not np.ndim(fits) or fits.shape[-1] != len(splits):
            return self
        kept: NDArray[np.bool_] = np.asarray(fits.any(axis=tuple(range(fits.ndim - 1))))
        kept[:2] |= np.count_nonzero(kept) < 2  # a single one would have no axis of its own
        if np.count_nonzero(kept) > WORTH_CUTTING * len(kept):
            return self
        former, cell = self.shared.get("cut"), self.cell.with_splits(kept)
        if former is None or not np.array_equal(kept, former[0]):
            index = cell.grid()
            legal, hosted = (_of_splits(each, kept) for each in (self.legal, self.hosted))
            w = cell.workload(index)
            former = kept, CellMemory(cell, index, w, legal, self.peak, hosted)
            self.shared["cut"] = former
        cut: CellMemory = former[1]
        return cut.of_kernels(cell, _of_splits(self.peak, kept))

    def of_kernels(self, cell: Cell, peak: Array) -> CellMemory:
        """The same combinations of a cell that differs in its kernels, which hold otherwise."""
        return replace(
            self, cell=cell, workload=replace(self.workload, fixed=cell.fixed), peak=peak
        )

    def collectives(self) -> list[CollectiveCall]:
        """Of a step; kernels change none."""
        if "calls" not in self.shared:
            self.shared["calls"] = step_collectives(self.workload)
        calls: list[CollectiveCall] = self.shared["calls"]
        return calls


def _of_splits(values: NDArray[Any], kept: NDArray[np.bool_]) -> NDArray[Any]:
    """`values` of some splits, which are the last axis where they differ."""
    differ = values.ndim and values.shape[-1] == len(kept)
    return values[..., kept] if differ else values


@dataclass(frozen=True)
class EvaluatedCell:
    """All combinations of a cell; arrays broadcast to `shape`, for few axes touch each of them."""

    shape: tuple[int, ...]
    legal: NDArray[np.bool_]
    peak: Array
    """Largest peak over all pipeline ranks, bytes."""
    seconds: Array
    """Of a step."""
    compute: Array
    """Seconds of it in which the busiest pipeline rank computes."""

    def at(self, values: Array, numbers: NDArray[np.int64]) -> Array:
        """`values` of the combinations with these numbers."""
        return np.asarray(
            np.broadcast_to(values, self.shape)[np.unravel_index(numbers, self.shape)]
        )


@dataclass(frozen=True)
class CellEvaluator:
    """What all cells of a space share: constants, and the layers of every split, computed once."""

    constants: dict[tuple[int, int], Constants]
    """By GPUs and pipeline ranks; what depends on the plan's kernels is in the layers."""
    layers: dict[tuple[str, int], SplitLayerTimes]
    """By tensor algorithm and tiles."""
    _former: list[CellMemory] = field(default_factory=list, compare=False, repr=False)
    """The cell before."""

    @classmethod
    def of(cls, space: SearchSpace) -> CellEvaluator:
        """Computes every layer of the space."""
        kinds = {
            kind: space.base.replace(**{"strategy.kernels": kind}).resolve()
            for kind in space.kernels
        }
        return cls(
            _constants(space),
            layer_times_by_division(
                space, {kind: with_calibration(plan)[1] for kind, plan in kinds.items()}
            ),
        )

    @classmethod
    def of_memory(cls, space: SearchSpace) -> CellEvaluator:
        """Computes no layer: for `memory` alone."""
        return cls(_constants(space), {})

    def __call__(self, cell: Cell, index: Index) -> EvaluatedCell:
        """The combinations at `index` of `cell`: of a grid, all of them, in the order of its
        axes.
        """
        return self.times(self.memory(cell, index))

    def memory(self, cell: Cell, index: Index) -> CellMemory:
        """What they hold; sizes are those of the cell before where that differs in its kernels
        alone.
        """
        k = self.constants[cell.fixed.world_size, cell.fixed.pipeline]
        if self._former and _differs_in_kernels(self._former[0], cell, index):
            w = replace(self._former[0].workload, fixed=cell.fixed)
            return self._former[0].of_kernels(cell, largest_peaks(w, k)[0])
        w = cell.workload(index)
        legal = np.asarray(cell.is_own_plan(w, index))
        peak, hosted = largest_peaks(w, k)
        held = CellMemory(cell, index, w, legal, peak, np.asarray(hosted))
        self._former[:] = [held]
        return held

    def times(self, held: CellMemory) -> EvaluatedCell:
        """How long their steps take."""
        w, s = held.workload, held.cell.fixed
        k = self.constants[s.world_size, s.pipeline]
        layers = self.layers[s.algorithm, s.tile_factor].at(held.cell, held.index)
        time = step_time(w, k, layers, held.collectives())
        return EvaluatedCell(
            held.shape,
            held.legal,
            held.peak,
            np.asarray(time.seconds),
            np.asarray(longest_compute_seconds(w, time)),
        )


def _differs_in_kernels(former: CellMemory, cell: Cell, index: Index) -> bool:
    """Whether a cell differs from the former in its kernels alone, and is asked about the same."""
    same = former.cell.table is cell.table and former.index.keys() == index.keys()
    s, t = former.cell.fixed, cell.fixed
    same = same and (s.zero, s.tile_factor) == (t.zero, t.tile_factor)
    return same and all(np.array_equal(at, index[axis]) for axis, at in former.index.items())


def _constants(space: SearchSpace) -> dict[tuple[int, int], Constants]:
    """By GPUs and pipeline ranks: a calibration's depend on both, and are fetched once for
    each.
    """
    base, usual = space.base, with_calibration(space.base)[1]
    pairs = {
        (s.world_size, p): s
        for s in space.fixed_configs
        for _, _, p in space.schedules
        if s.world_size % p == 0
    }
    if base.cluster.calibration is None:
        return dict.fromkeys(pairs, usual)
    return {pair: with_calibration(plan_on_gpus(base, s, pair[1]))[1] for pair, s in pairs.items()}
