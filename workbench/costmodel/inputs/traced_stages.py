"""A user's traced module as the cost model reads it: its stages, how each operator is sharded, and
the parameters that a rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from workbench.costmodel.inputs.operator_strategies import RankGrid
from workbench.plan.operators.least_redistribution import LeastRedistribution
from workbench.plan.operators.traced.graph_placement import NodeShards, ParameterShards
from workbench.plan.operators.traced.node_factors import FactoredGraph
from workbench.plan.operators.traced.stage_cuts import GraphStage
from workbench.plan.operators.traced.traced_graph import TensorRef, TracedTensor

DTYPE_NAMES = {
    "torch.float64": ("fp64", 8),
    "torch.float32": ("fp32", 4),
    "torch.bfloat16": ("bf16", 2),
    "torch.float16": ("fp16", 2),
    "torch.int64": ("int64", 8),
    "torch.int32": ("int32", 4),
    "torch.int16": ("int16", 2),
    "torch.int8": ("int8", 1),
    "torch.uint8": ("uint8", 1),
    "torch.bool": ("bool", 1),
    "torch.complex64": ("complex64", 8),
    "torch.complex128": ("complex128", 16),
}
"""torch's name -> (name in collectives, bytes of an element)."""


@dataclass(frozen=True)
class TracedParameter:
    """One parameter of a stage on this rank.

    Attributes:
        name: In the module.
        shape: Local.
        partial_over: Axes of the grid over which its gradient is summed once a step.
        is_read: Whether an operator reads it, so that backward makes its gradient.
    """

    name: str
    shape: tuple[int, ...]
    partial_over: tuple[int, ...]
    is_read: bool = True

    @property
    def elements(self) -> int:
        """Entries."""
        return math.prod(self.shape)

    @property
    def is_of_experts(self) -> bool:
        """Whether it belongs to experts that other ranks do not hold: nothing says so of it."""
        return False

    @property
    def unit(self) -> str:
        """The ZeRO-3 unit that it belongs to: of a user's module all are one, but for names that
        look like ours.
        """
        first, second, *_ = (*self.name.split("."), "")
        return {"blocks": second, "embedding": first}.get(first, "head")


@dataclass(frozen=True, eq=False)
class TracedStages(RankGrid):
    """A module as a plan runs it.

    Attributes:
        factored: Its graph.
        shards: Node id -> how it is sharded.
        stored: Parameter id -> how it is stored.
        stages: Parts that pipeline stages run.
        parameters: Name -> shape of all parameters, in the module's order, tied ones once.
        tied: Name of a parameter that the first and the last stage share.
        buffer_bytes: Of all buffers.
        least: Chooses the steps of each redistribution.
    """

    factored: FactoredGraph
    shards: Mapping[str, NodeShards]
    stored: Mapping[str, ParameterShards]
    stages: Sequence[GraphStage]
    parameters: Mapping[str, tuple[int, ...]]
    tied: str | None
    buffer_bytes: int
    least: LeastRedistribution
    ids: Mapping[str, str] = field(init=False)
    """Name of a parameter that operators read -> its id in the graph."""
    types: Mapping[TensorRef, TracedTensor] = field(init=False)
    """Every tensor of the graph, unsharded."""

    def __post_init__(self) -> None:
        ids = {name: key for key, name in self.factored.graph.parameters.items()}
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "types", self.factored.graph.tensors())

    def of_stage(self, stage: int) -> list[TracedParameter]:
        """Parameters of a stage, in the module's order; the first has those that nothing reads."""
        reads = [{ref.source for n in part.nodes for ref in n.inputs} for part in self.stages]
        anywhere = set().union(*reads)
        unread = {name for name in self.parameters if self.ids.get(name) not in anywhere}
        return [
            replace(self._parameter(name), is_read=name not in unread)
            for name in self.parameters
            if self.ids.get(name) in reads[stage] or (stage == 0 and name in unread)
        ]

    def largest(self, stages: Sequence[int]) -> float:
        """Entries of the tied parameter if these stages have it, else of their largest one."""
        own = {p.name: p.elements for stage in stages for p in self.of_stage(stage)}
        return float(own.get(self.tied or "", max(own.values(), default=1)))

    def _parameter(self, name: str) -> TracedParameter:
        key = self.ids.get(name)
        if key is None:
            return TracedParameter(name, self.parameters[name], ())
        stored = self.stored[key]
        shape = self.factored.tensors[TensorRef(key)].local_shape(stored.layout, self.sides)
        return TracedParameter(name, tuple(shape), tuple(sorted(stored.summed)))

    @property
    def boundary(self) -> tuple[int, ...]:
        """Local shape of what passes between stages."""
        ref = self.stages[0].written
        layout = self.shards[ref.source].outputs[ref.index]
        return tuple(self.factored.tensors[ref].local_shape(layout, self.sides))
