"""The pipeline ranks of a schedule, alike ones taken together: what differs between few ranks is
computed for few.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.costmodel.inputs.config import Array, FixedConfig, count_recomputed, layer_homes
from workbench.costmodel.inputs.rank_workload import stage_layers
from workbench.planner.search.search_space import recomputed_layers
from workbench.schedules.generators import SCHEDULES


@dataclass(frozen=True)
class DistinctStages:
    """Pipeline ranks that stand for all."""

    ranks: NDArray[np.int64]
    """Of ranks alike the one that holds most in flight."""
    multiplicity: Array
    """How many each stands for."""
    recomputed: Array
    """Layers that each recomputes in full (columns: kinds of recomputation)."""
    layers_after: Array
    """Layers behind the last of them."""


def distinct_stages(s: FixedConfig, kinds: tuple[str | float, ...]) -> DistinctStages:
    """The distinct pipeline ranks of a setting under every kind of recomputation."""
    where, rank = layer_homes(s), np.arange(s.pipeline)
    layers = np.arange(len(where))
    each = [
        count_recomputed(
            where, np.isin(layers, list(recomputed_layers(kind, s.partition))), s.pipeline
        )
        for kind in kinds
    ]
    recomputed, kept_after = (np.stack(columns, axis=1) for columns in zip(*each))
    ends = np.stack([rank == 0, rank == s.pipeline - 1], axis=1)
    alike = np.concatenate(
        [np.stack(stage_layers(s), axis=1), recomputed, kept_after, ends], axis=1
    )
    order = -1 if SCHEDULES[s.schedule].last_rank_has_most else 1
    _, most, count = np.unique(alike[::order], axis=0, return_index=True, return_counts=True)
    ranks = rank[::order][most]
    return DistinctStages(ranks, count.astype(float), recomputed[ranks], kept_after[ranks])
