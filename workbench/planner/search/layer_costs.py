"""The layers of every split of a space, computed once: what no pipeline, sharding or placement
changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.costmodel.compute.kernel_rates import PassTimes, device_rates
from workbench.costmodel.compute.measured_layer import measured_layer_times
from workbench.costmodel.compute.roofline import LayerTimes
from workbench.costmodel.inputs.config import Array, FixedConfig, Number
from workbench.costmodel.rates.constants import Constants
from workbench.planner.search.cells import Cell, Index, splits_of_tiles
from workbench.planner.search.distinct_stages import distinct_stages
from workbench.planner.search.layer_splits import LayerSplit, all_splits
from workbench.planner.search.search_space import SearchSpace

PlaceIndex = NDArray[np.int64]
FIRST_PLACE: PlaceIndex = np.zeros((), dtype=np.int64)
PASS_FIELDS = tuple(field.name for field in fields(PassTimes))


@dataclass(frozen=True)
class SplitLayerTimes:
    """The layers of every split of one tensor algorithm and number of tiles."""

    splits: dict[LayerSplit, int]
    """Split -> its place."""
    kinds: dict[str, int]
    """The plan's kernels -> their place."""
    seconds: LayerTimes
    """By place of the split; but for attention by that of the kernels before."""

    def at(self, cell: Cell, index: Index) -> LayerTimes:
        """Those of a cell's candidates."""
        own = np.array([self.splits[split] for split in cell.values["split"]])[
            index.get("split", FIRST_PLACE)
        ]
        kinds = np.array([self.kinds[kind] for kind in cell.values["kernels"]])[
            index.get("kernels", FIRST_PLACE)
        ]
        k = self.seconds
        dense, moe, head = (
            _take_fields(one, lambda x: x[kinds, own]) for one in (k.dense, k.moe, k.head)
        )
        frozen = {of: _take_fields(one, lambda x: x[kinds, own]) for of, one in k.frozen.items()}
        return LayerTimes(dense, moe, _take_fields(k.attention, lambda x: x[own]), head, frozen)


def layer_times_by_division(
    space: SearchSpace, constants: dict[str, Constants]
) -> dict[tuple[str, int], SplitLayerTimes]:
    """Of each tensor algorithm and number of tiles that divide something; `constants` by the plan's
    kernels.
    """
    found = {}
    for algorithm, tiles in product(space.algorithm, space.tile_factor):
        s = replace(space.fixed_configs[0], algorithm=algorithm, tile_factor=tiles)
        splits = tuple(all_splits(space, algorithm))
        if tiles > 1:
            splits = splits_of_tiles(3, 1, splits)
        if splits:
            found[algorithm, tiles] = _split_layer_times(s, space, splits, constants)
    return found


def _split_layer_times(
    setting: FixedConfig,
    space: SearchSpace,
    splits: tuple[LayerSplit, ...],
    constants: dict[str, Constants],
) -> SplitLayerTimes:
    each = [
        _layer_times_of_kernels(setting, space, splits, kind, k) for kind, k in constants.items()
    ]
    dense, moe, head = (
        _stack_kernels([getattr(one, of) for one in each], len(splits))
        for of in ("dense", "moe", "head")
    )
    frozen = {
        kind: _stack_kernels([one.frozen[kind] for one in each], len(splits))
        for kind in each[0].frozen
    }
    seconds = replace(each[0], dense=dense, moe=moe, head=head, frozen=frozen)
    return SplitLayerTimes(
        {split: i for i, split in enumerate(splits)},
        {kind: i for i, kind in enumerate(constants)},
        seconds,
    )


def _layer_times_of_kernels(
    setting: FixedConfig,
    space: SearchSpace,
    splits: tuple[LayerSplit, ...],
    kind: str,
    k: Constants,
) -> LayerTimes:
    """A cell of one stage that differs in its splits only."""
    alone: FixedConfig = replace(
        setting,
        pipeline=1,
        schedule="1f1b",
        chunks=1,
        partition=(setting.shape.layers,),
        zero=0,
        kernels=kind,
        has_context_parallel=max(space.context) > 1,
    )
    values: dict[str, tuple[Any, ...]] = {
        "split": splits,
        "kernels": (kind,),
        "placement": space.placement[:1],
        "recompute": ("none",),
        "shard": ("all",),
        "offload": ("none",),
        "reduce": ("step",),
        "keep_gathered": (False,),
        "overlap": (True,),
        "bucket_mib": (25.0,),
        "gradient": ("auto",),
    }
    cell = Cell(alone, values, distinct_stages(alone, ("none",)), np.array(splits, dtype=float).T)
    w = cell.workload({"split": np.arange(len(splits))})
    return measured_layer_times(w, device_rates(setting.gpu, setting.precision, k))


def _stack_kernels(each: list[PassTimes], size: int) -> PassTimes:
    """The same pass, by one kind of kernels after the other."""
    return PassTimes(
        *(
            np.stack([np.broadcast_to(getattr(one, name), size) for one in each])
            for name in PASS_FIELDS
        )
    )


def _take_fields(one: PassTimes, take: Callable[[Array], Number]) -> PassTimes:
    """Every array of a pass at some places; a number that is the same of all stays one."""
    return PassTimes(
        *(take(x) if np.ndim(x) else x for x in (getattr(one, name) for name in PASS_FIELDS))
    )
