"""Memory and time of all candidates of a cell at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.plan.schema import Plan
from workbench.planner.calibrated import on_machine
from workbench.planner.compute import Kernels, Pass, kernels, machine
from workbench.planner.constants import Constants
from workbench.planner.memory import peaks
from workbench.planner.search.cells import Cell, Index, Split, all_splits
from workbench.planner.search.space import Space
from workbench.planner.search.stages import stages_of
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

    base: Plan
    constants: Constants
    places: dict[Split, int]
    layers: Kernels

    @classmethod
    def of(cls, space: Space) -> Evaluator:
        """Computes every layer of the space."""
        setting = space.settings[0]
        k = on_machine(space.base)[1]
        splits = tuple(all_splits(space))
        alone = replace(setting, pipeline=1, schedule="1f1b", chunks=1, partition=(setting.shape.layers,), zero=0)
        values: dict[str, tuple[Any, ...]] = {
            "split": splits, "placement": space.placement[:1], "recompute": ("none",), "shard": ("all",),
            "offload": ("none",), "reduce": ("step",), "keep_gathered": (False,), "overlap": (True,),
            "bucket_mib": (25.0,), "gradient": ("auto",),
        }  # fmt: skip
        cell = Cell(alone, values, stages_of(alone, ("none",)), np.array(splits, dtype=float).T)
        w, _ = cell.workload({"split": np.arange(len(splits))})
        layers = kernels(w, machine(setting.card, setting.precision, k))
        return cls(space.base, k, {split: i for i, split in enumerate(splits)}, layers)

    def __call__(self, cell: Cell, index: Index) -> Evaluated:
        """The combinations at `index` of `cell`: of a grid, all of them, in the order of its axes."""
        w, legal = cell.workload(index)
        k = self._constants(cell)
        time = step_time(w, k, self._layers(cell, index))
        shape = np.broadcast_shapes(*(places.shape for places in index.values())) if index else (1,)
        return Evaluated(
            shape, np.asarray(legal), peaks(w, k), np.asarray(time.seconds), np.asarray(computing(w, time))
        )

    def _constants(self, cell: Cell) -> Constants:
        """The constants of the cell's ranks; a calibration's depend on how many there are and on the layers of each."""
        s = cell.setting
        if self.base.cluster.calibration is None:
            return self.constants
        sizes = {"cluster.gpus": s.world, "cluster.nodes": None, "cluster.gpus_per_node": s.node}
        stages = {"strategy.pipeline.size": s.pipeline, "strategy.pipeline.partition": "balanced"}
        alike = self.base.replace(**sizes, **stages, **{"training.global_batch": s.world})
        return on_machine(alike.complete())[1]

    def _layers(self, cell: Cell, index: Index) -> Kernels:
        """The layers of the cell's splits, out of all."""
        own = np.array([self.places[split] for split in cell.values["split"]])
        at = own[index["split"]] if "split" in index else own[0]
        passes = (self.layers.dense, self.layers.mixture, self.layers.attention, self.layers.head)
        return Kernels(
            *(
                Pass(*(_take(x, at) for x in (p.forward, p.backward, p.weight, p.idle_forward, p.idle_backward)))
                for p in passes
            )
        )


def _take(values: Number, at: NDArray[np.int64]) -> Number:
    return values[at] if np.ndim(values) else values
