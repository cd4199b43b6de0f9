"""Memory and time of all candidates of a cell at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from workbench.planner.compute import Kernels, Pass, kernels, machine
from workbench.planner.constants import Constants, constants
from workbench.planner.memory import peaks
from workbench.planner.search.cells import Cell, Index, Split, all_splits
from workbench.planner.search.space import Space
from workbench.planner.setting import Array, Number
from workbench.planner.step import computing, step_time


@dataclass(frozen=True)
class Evaluated:
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
        return np.asarray(np.broadcast_to(values, self.shape)[np.unravel_index(numbers, self.shape)])


@dataclass(frozen=True)
class Evaluator:
    """What all cells of a space share: constants, and the layers of every split, computed once."""

    constants: Constants
    places: dict[Split, int]
    layers: Kernels

    @classmethod
    def of(cls, space: Space) -> Evaluator:
        """Computes every layer of the space."""
        setting = space.settings[0]
        k = constants(setting.card, setting.kernels, setting.stack)
        splits = tuple(all_splits(space))
        alone = replace(setting, pipeline=1, schedule="1f1b", chunks=1, partition=(setting.shape.layers,), zero=0)
        cell = Cell(alone, dict.fromkeys(("recompute", "offload"), ("none",)) | {
            "split": splits, "placement": space.placement[:1], "shard": ("all",), "reduce": ("step",),
            "keep_gathered": (False,), "overlap": (True,),
        })  # fmt: skip
        w, _ = cell.workload({"split": np.arange(len(splits))})
        return cls(
            k, {split: i for i, split in enumerate(splits)}, kernels(w, machine(setting.card, setting.precision, k))
        )

    def __call__(self, cell: Cell, index: Index) -> Evaluated:
        """The combinations at `index` of `cell`: of a grid, all of them, in the order of its axes."""
        w, legal = cell.workload(index)
        time = step_time(w, self.constants, self._layers(cell, index))
        shape = np.broadcast_shapes(*(places.shape for places in index.values())) if index else (1,)
        return Evaluated(
            shape, np.asarray(legal), peaks(w, self.constants), np.asarray(time.seconds), np.asarray(computing(w, time))
        )

    def _layers(self, cell: Cell, index: Index) -> Kernels:
        """The layers of the cell's splits, out of all."""
        own = np.array([self.places[split] for split in cell.values["split"]])
        at = own[index["split"]] if "split" in index else own[0]
        passes = (self.layers.dense, self.layers.mixture, self.layers.attention, self.layers.head)
        return Kernels(*(Pass(*(_take(x, at) for x in (p.forward, p.backward, p.weight))) for p in passes))


def _take(values: Number, at: NDArray[np.int64]) -> Number:
    return values[at] if np.ndim(values) else values
