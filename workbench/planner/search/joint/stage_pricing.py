"""Seconds of every stage on a submesh: its operators' strategies, the gradients of its replicas,
and its transfers, by the cost model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from workbench.costmodel.communication.collective_cost import (
    AxisLink,
    collective_seconds,
    group_link,
)
from workbench.costmodel.inputs.config import FixedConfig
from workbench.costmodel.rates.constants import Constants
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.autoshard.device_mesh import logical_mesh
from workbench.planner.autoshard.for_plans.memory_changes import sharded_state
from workbench.planner.autoshard.graph_pricing import GraphPricing
from workbench.planner.autoshard.operator_cost import TensorBytes
from workbench.planner.autoshard.plan_problem import machine_model, tensor_bytes
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.search.joint.joint_space import JointChoice
from workbench.planner.search.joint.stage_choices import StageChoices
from workbench.planner.search.joint.stage_division import Costs
from workbench.planner.search.joint.stage_seconds import StageLimits, StageSeconds, stage_seconds

ENDS = ((False, False), (False, True), (True, False), (True, True))
"""(first, last) stage."""


@dataclass(frozen=True)
class Stage:
    """One stage of a division."""

    layers: int
    strategies: Mapping[str, str]
    """Module pattern -> strategy."""
    recomputed: int
    """Layers that are recomputed in backward."""


@dataclass
class StagePricing:
    """Stages of one model on one cluster.

    Args:
        base: The plan, complete and neutral, on all GPUs of `setting`.
        setting: Its GPUs and batch.
    """

    base: ResolvedPlan
    setting: FixedConfig
    _choices: dict[tuple[int, int, int], StageChoices] = field(default_factory=dict)
    _meshes: dict[int, GraphPricing] = field(default_factory=dict)

    def costs(self, choice: JointChoice, stages: int, memory: float) -> Costs:
        """Seconds of a microbatch `[stages, first, last, layers + 1]`, by stages after this one.

        Args:
            choice: The submesh, and what is tried on it.
            stages: The most.
            memory: Bytes of a rank.
        """
        found = np.full((stages, 2, 2, self.base.shape.layers + 1), np.inf)
        for ends in ENDS if stages > 1 else ENDS[-1:]:
            found[:, int(ends[0]), int(ends[1])] = self._of(choice, ends, stages, memory).seconds
        return found

    def stages(self, choice: JointChoice, layers: Sequence[int], memory: float) -> list[Stage]:
        """The stages of these layers, with what is fastest on each."""
        found = []
        for at, count in enumerate(layers):
            ends, after = (at == 0, at == len(layers) - 1), len(layers) - 1 - at
            best = self._of(choice, ends, after + 1, memory)
            own = self._on(choice).of(*ends)[int(best.choice[after, count])]
            found.append(Stage(count, own.strategies, int(best.recomputed[after, count])))
        return found

    def _of(
        self, choice: JointChoice, ends: tuple[bool, bool], stages: int, memory: float
    ) -> StageSeconds:
        layers, limits = self.base.shape.layers, self._limits(choice, memory)
        return stage_seconds(self._on(choice).of(*ends), layers, stages, limits)

    def _on(self, choice: JointChoice) -> StageChoices:
        tensor, microbatches = choice.submesh.tensor, choice.microbatches(self.setting.global_batch)
        key = tensor, choice.sequences, microbatches
        if key not in self._choices:
            # Redistributions are priced once for all numbers of microbatches.
            pricing = replace(self._on_ranks(tensor), microbatches=microbatches, _costs={})
            length = self.base.training.sequence_length
            self._choices[key] = StageChoices(self.base.shape, choice.sequences, length, pricing)
        return self._choices[key]

    def _on_ranks(self, tensor: int) -> GraphPricing:
        if tensor not in self._meshes:
            machine = machine_model(self.base, tensor)
            self._meshes[tensor] = GraphPricing(logical_mesh(tensor, machine), machine, self._sizes)
        return self._meshes[tensor]

    @cached_property
    def _sizes(self) -> TensorBytes:
        return tensor_bytes(self.base)

    @cached_property
    def _constants(self) -> Constants:
        return with_calibration(self.base)[1]

    def _limits(self, choice: JointChoice, memory: float) -> StageLimits:
        sizes, replicas = self._sizes, choice.submesh.replicas
        state = sharded_state(sizes, choice.zero, replicas, False).state

        def with_replicas(operators: Costs, parameters: Costs) -> Costs:
            return self._with_replicas(choice, operators, parameters)

        return StageLimits(memory, state, self._transfers(choice), with_replicas)

    def _with_replicas(self, choice: JointChoice, operators: Costs, parameters: Costs) -> Costs:
        """With gradients and, under ZeRO, parameters over the replicas. Those that ZeRO-3 gathers
        for every microbatch overlap the operators.
        """
        replicas, sizes = choice.submesh.replicas, self._sizes
        if replicas == 1:
            return operators
        link, constants = self._link(replicas, choice.submesh.tensor), self._constants

        def seconds(kind: str, element: float) -> Costs:
            size = parameters * element
            return np.asarray(collective_seconds(kind, size, replicas, link, constants))

        microbatches = choice.microbatches(self.setting.global_batch)
        if choice.zero == 0:
            return operators + seconds("all_reduce", sizes.gradient) / microbatches
        reduced = seconds("reduce_scatter", sizes.gradient) / microbatches
        gathered = seconds("all_gather", sizes.element)
        if choice.zero < 3:
            return operators + reduced + gathered / microbatches
        return np.maximum(operators, 2 * gathered) + reduced

    def _transfers(self, choice: JointChoice) -> float:
        """Seconds of a microbatch's activations to the next stage, and of their gradients back."""
        shape, length = self.base.shape, self.base.training.sequence_length
        size = choice.sequences * length * shape.hidden * self._sizes.element
        if choice.submesh.ranks == self.setting.world_size:
            return 0.0
        link = self._link(2, choice.submesh.ranks)
        return 2 * (size / float(link.bandwidth) + float(link.latency))

    def _link(self, size: int, stride: int) -> AxisLink:
        measured, node = with_calibration(self.base)[0], self.setting.gpus_per_node
        found = group_link(measured.gpu, measured.fabric, node, self._constants, size, stride)
        return replace(found, bandwidth=float(found.bandwidth), latency=float(found.latency))


def step_bound(costs: Costs, stages: int, microbatches: int) -> float:
    """Seconds that no step of so many stages is below: an even share of the layers' least time."""
    counts = np.arange(1, costs.shape[-1])
    rate = float((costs[..., 1:] / counts).min())
    layers = costs.shape[-1] - 1
    return rate * layers * (1 + (microbatches - 1) / stages) if math.isfinite(rate) else math.inf
