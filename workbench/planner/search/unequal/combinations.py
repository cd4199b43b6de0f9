"""Every combination of tensor-parallel size, recomputation and number of microbatches, with the
layers that it prices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

import numpy as np

from workbench.costmodel.inputs.config import FixedConfig
from workbench.errors import PlanError
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules import legal_sizes
from workbench.planner.profiled_models.planned_stages import plan_batch
from workbench.planner.search.search_space import SearchSpace, plan_on_gpus
from workbench.planner.unequal_stages.cluster_topology import cluster_topology
from workbench.planner.unequal_stages.estimated_layers import (
    BlockSplit,
    EstimatedLayers,
    estimated_layers,
    seconds_at_once,
)
from workbench.planner.unequal_stages.merged_layers import merged_layers
from workbench.planner.unequal_stages.stage_times import Batch, one_device_seconds
from workbench.planner.unequal_stages.topology import Topology

MOST_COUNTS = 24
"""Numbers of microbatches that are tried, evenly spread over those that divide the batch."""


def microbatch_counts(batch: int) -> list[int]:
    """Numbers of microbatches that divide `batch` sequences."""
    every = legal_sizes.divisors(batch)
    if len(every) <= MOST_COUNTS:
        return every
    return [every[i] for i in np.linspace(0, len(every) - 1, MOST_COUNTS).round().astype(int)]


@dataclass(frozen=True, eq=False)
class Combination:
    """Everything of a plan but its stages."""

    setting: FixedConfig
    """The GPUs."""
    split: BlockSplit
    microbatches: int
    layers: EstimatedLayers
    topology: Topology
    """Of replicas; its memory is what a rank has for state and activations."""
    stack: str
    """The framework."""

    @property
    def sequences(self) -> int:
        """Of a microbatch."""
        return self.setting.global_batch // self.microbatches

    @property
    def batch(self) -> Batch:
        """What a step trains on."""
        return self.layers.of(self.microbatches, self.sequences)

    @cached_property
    def least_seconds(self) -> float:
        """That no plan is under: a microbatch's way through the model with most replicas, and the
        rest of the work, as many sequences at once as is quickest, shared evenly by all.
        """
        profile, batch, devices = self.layers.profile, self.batch, self.topology.world_size
        most = min(devices, batch.sequences) if batch.whole_sequences else devices
        way = float(batch.passes_of(most, profile))
        rest = (batch.microbatches - 1) * batch.least_passes(profile) / devices
        return (way + rest) * (profile.forward[-1] + profile.backward[-1])


class Combinations:
    """The combinations of a space, with the layers of each split priced once."""

    def __init__(self, space: SearchSpace, largest_peak: float) -> None:
        self.space, self.largest_peak = space, largest_peak
        self._layers = lru_cache(maxsize=None)(self._priced)
        self._seconds = lru_cache(maxsize=None)(self._priced_at_once)
        self._bases: dict[int, ResolvedPlan] = {}

    def on(self, setting: FixedConfig) -> list[Combination]:
        """All of so many GPUs, the least bound first."""
        found = [
            self._combination(setting, split, topology, count)
            for split, topology in self._splits(setting)
            for count in microbatch_counts(setting.global_batch)
        ]
        return sorted(found, key=lambda one: one.least_seconds)

    def one_gpu_seconds(self, setting: FixedConfig) -> float:
        """Compute of a step on one GPU, if it held all, without recomputation, as many sequences at
        once as is quickest.
        """
        self._base(setting)
        layers = self._layers(setting.world_size, BlockSplit(), 1)
        return one_device_seconds(layers.profile, layers.of(1, setting.global_batch))

    def _splits(self, setting: FixedConfig) -> Iterator[tuple[BlockSplit, Topology]]:
        """Every way to share a block inside a node, and the replicas that it makes."""
        space, zero = self.space, max(self.space.zero, default=0)
        for tensor in space.tensor:
            if not isinstance(tensor, int) or tensor > setting.gpus_per_node:
                continue
            try:
                topology = cluster_topology(self._base(setting), tensor)
            except PlanError:  # nodes do not hold such replicas evenly
                continue
            for sequence, recompute in product(self._sequence(setting, tensor), space.recompute):
                yield BlockSplit(tensor, sequence, str(recompute), zero), topology

    def _sequence(self, setting: FixedConfig, tensor: int) -> Sequence[bool]:
        """Whether to shard norms and residuals, where there is something to shard."""
        legal = tensor > 1 and setting.sequence_length % tensor == 0
        return [on for on in self.space.sequence if legal or not on]

    def _combination(
        self, setting: FixedConfig, split: BlockSplit, topology: Topology, count: int
    ) -> Combination:
        sequences = max(1, setting.global_batch // count // topology.world_size)
        layers = self._layers(setting.world_size, split, sequences)
        memory = layers.memory(self.largest_peak)
        stack = self.space.base.strategy.stack
        return Combination(setting, split, count, layers, replace(topology, memory=memory), stack)

    def _priced(self, world: int, split: BlockSplit, sequences: int) -> EstimatedLayers:
        base = self._bases[world]
        if base.profiled:
            profile = merged_layers(base.layer_profile)
            return EstimatedLayers(profile, plan_batch(base), 0.0, 0.0, 0.0)
        layers, known = estimated_layers(base, split, sequences), self._seconds(world, split)
        one = np.interp(sequences, *np.array(known).T)
        passes = tuple((at, float(seconds / one)) for at, seconds in known)
        return replace(layers, batch=replace(layers.batch, passes=passes))

    def _priced_at_once(self, world: int, split: BlockSplit) -> list[tuple[int, float]]:
        """(sequences, seconds that a replica of all blocks takes for so many at once)."""
        base, most = self._bases[world], self.space.batch
        at = (2**i for i in range((most - 1).bit_length() + 1))
        return [(0, 0.0), *((n, seconds_at_once(base, split, n)) for n in at)]

    def _base(self, setting: FixedConfig) -> ResolvedPlan:
        if setting.world_size not in self._bases:
            self._bases[setting.world_size] = plan_on_gpus(self.space.base, setting)
        return self._bases[setting.world_size]
