"""Memory and time of all candidates of a cell at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.costmodel.inputs.config import Array
from workbench.costmodel.memory.peak_memory import max_peak_bytes
from workbench.costmodel.rates.constants import Constants
from workbench.costmodel.step_time import longest_compute_seconds, step_time
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.search.cells import Cell, Index
from workbench.planner.search.layer_costs import SplitLayerTimes, layer_times_by_algorithm
from workbench.planner.search.search_space import SearchSpace, plan_on_gpus


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

    def count(self, which: NDArray[np.bool_]) -> int:
        """Combinations that `which`, of a shape that broadcasts, is true of."""
        return int(np.count_nonzero(which)) * (math.prod(self.shape) // max(1, np.size(which)))

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
    layers: dict[str, SplitLayerTimes]
    """By tensor algorithm."""

    @classmethod
    def of(cls, space: SearchSpace) -> CellEvaluator:
        """Computes every layer of the space."""
        kinds = {
            kind: space.base.replace(**{"strategy.kernels": kind}).resolve()
            for kind in space.kernels
        }
        return cls(
            _constants(space),
            layer_times_by_algorithm(
                space, {kind: with_calibration(plan)[1] for kind, plan in kinds.items()}
            ),
        )

    def __call__(self, cell: Cell, index: Index) -> EvaluatedCell:
        """The combinations at `index` of `cell`: of a grid, all of them, in the order of its
        axes.
        """
        w, legal = cell.workload(index)
        s = cell.fixed
        k = self.constants[s.world_size, s.pipeline]
        time = step_time(w, k, self.layers[s.algorithm].at(cell, index))
        shape = np.broadcast_shapes(*(places.shape for places in index.values())) if index else (1,)
        return EvaluatedCell(
            shape,
            np.asarray(legal),
            max_peak_bytes(w, k),
            np.asarray(time.seconds),
            np.asarray(longest_compute_seconds(w, time)),
        )


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
