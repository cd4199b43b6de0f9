"""The pipeline ranks of a schedule, alike ones taken together: what differs between few ranks is
computed for few.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.costmodel.inputs.adapted_layers import AdaptedLayer, adapted_layer
from workbench.costmodel.inputs.config import (
    Array,
    FixedConfig,
    count_recomputed,
    stage_homes,
    stages_of_each,
    stages_that_run,
)
from workbench.planner.search.search_space import recomputed_layers
from workbench.schedules.generators import SCHEDULES


@dataclass(frozen=True)
class DistinctStages:
    """Pipeline ranks that stand for all."""

    ranks: NDArray[np.int64]
    """Of ranks alike the one that holds most in flight."""
    alike: tuple[tuple[int, ...], ...]
    """The ranks that each stands for."""
    recomputed: Array
    """Layers recomputed in full, by stage of each of `ranks`, one rank after the other (columns:
    kinds of recomputation).
    """
    layers_after: Array
    """Layers behind the last of them, likewise."""


def distinct_stages(s: FixedConfig, kinds: tuple[str | float, ...]) -> DistinctStages:
    """The distinct pipeline ranks of a setting under every kind of recomputation: alike are those
    whose stages are, in their order.
    """
    layers, rank = np.arange(sum(s.partition)), np.arange(s.pipeline)
    partition = stages_that_run(s.pipeline, s.partition)
    chosen = [np.isin(layers, list(recomputed_layers(kind, s.partition))) for kind in kinds]
    counts = count_recomputed(np.array(chosen), partition, s.adapted)
    recomputed, kept_after = (of_kinds.T for of_kinds in counts)
    homes = stage_homes(s.pipeline, s.schedule, len(partition), s.table)
    stages = np.stack(stages_of_each(homes, rank.tolist()))
    ends = np.stack([rank == 0, rank == s.pipeline - 1], axis=1)
    by_stage = [
        x[stages].reshape(s.pipeline, -1)
        for x in (*_layers(s, partition), _adapters(s, partition), recomputed, kept_after)
    ]
    kind_of_rank = np.concatenate([*by_stage, ends], axis=1)
    order = -1 if SCHEDULES[s.schedule].last_rank_has_most else 1
    _, most, which = np.unique(
        kind_of_rank[::order], axis=0, return_index=True, return_inverse=True
    )
    ranks, which = rank[::order][most], which.ravel()[::order]
    alike = tuple(tuple(np.flatnonzero(which == kind).tolist()) for kind in range(len(ranks)))
    own = stages[ranks].ravel()
    return DistinctStages(ranks, alike, recomputed[own], kept_after[own])


def _layers(s: FixedConfig, partition: tuple[int, ...]) -> tuple[Array, Array]:
    """Number of (all layers, layers with a dense feed-forward) of each stage."""
    moe, every = s.shape.moe, np.array(partition, dtype=float)
    first = np.concatenate([[0.0], np.cumsum(every)[:-1]])
    dense = np.clip(moe.first_dense - first, 0, every) if moe else every
    return every, dense


def _adapters(s: FixedConfig, partition: tuple[int, ...]) -> Array:
    """A number for each stage, the same for those whose layers have the same adapters in order."""
    ends, numbers = np.cumsum(partition), dict[tuple[AdaptedLayer, ...], int]()
    layers = [adapted_layer(s, layer) for layer in range(ends[-1])] if s.adapted else []
    own = (tuple(layers[end - count : end]) for end, count in zip(ends, partition))
    return np.array([float(numbers.setdefault(one, len(numbers))) for one in own])
