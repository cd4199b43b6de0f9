"""Which parts of the model a pipeline rank has, and the parameters that are its shards of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from workbench.costmodel.inputs.config import FixedConfig, stage_homes, stages_of_each
from workbench.costmodel.inputs.operator_strategies import (
    OperatorParameter,
    OperatorStrategies,
    stage_parameters,
)
from workbench.costmodel.inputs.traced_stages import TracedParameter
from workbench.plan.model.model_shape import Shape


@dataclass(frozen=True)
class StageParts:
    """A stage of the pipeline."""

    layers: range
    has_embedding: bool
    has_head: bool


def rank_stages(s: FixedConfig, pipeline_rank: int) -> list[StageParts]:
    """The stages of a pipeline rank, in their order."""
    return [stage_parts(s, stage) for stage in stages_of(s, pipeline_rank)]


def stages_of(s: FixedConfig, pipeline_rank: int) -> list[int]:
    """Numbers of the stages of a pipeline rank, in their order."""
    homes = stage_homes(s.pipeline, s.schedule, len(s.partition), s.table)
    own: list[int] = stages_of_each(homes, [pipeline_rank])[0].tolist()
    return own


def stage_parts(s: FixedConfig, stage: int) -> StageParts:
    """A stage of the pipeline."""
    first = sum(s.partition[:stage])
    layers = range(first, first + s.partition[stage])
    return StageParts(layers, stage == 0, stage == len(s.partition) - 1)


def rank_parameters(
    s: FixedConfig, pipeline_rank: int
) -> tuple[OperatorParameter | TracedParameter, ...]:
    """Parameters of a pipeline rank whose microbatch runs on shapes: one weight where the head is
    tied to an embedding of the same rank.
    """
    if s.traced is not None:
        own = stages_of(s, pipeline_rank)
        return tuple(p for stage in own for p in s.traced.of_stage(stage))
    assert s.operators is not None
    stages = tuple(rank_stages(s, pipeline_rank))
    if stages not in s.operators.parameters:
        s.operators.parameters[stages] = tuple(_of_stages(s.operators, s.shape, stages))
    return s.operators.parameters[stages]


def _of_stages(
    named: OperatorStrategies, shape: Shape, stages: tuple[StageParts, ...]
) -> Iterator[OperatorParameter]:
    both = shape.tied and any(x.has_embedding for x in stages)
    for x in stages:
        ends = x.has_embedding, x.has_head
        for p in stage_parameters(named, shape, x.layers, *ends):
            if not (both and p.name == "head.weight"):
                yield p
