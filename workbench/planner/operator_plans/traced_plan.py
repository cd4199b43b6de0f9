"""A plan whose model is a user's traced module, as the cost model takes it."""

from __future__ import annotations

import math

from workbench.costmodel.inputs.traced_stages import TracedStages
from workbench.costmodel.traced.operator_table import require_entries
from workbench.plan.model.model_shape import Shape
from workbench.plan.operators.traced.node_factors import factor_graph
from workbench.plan.operators.traced.planned_graph import planned_graph
from workbench.plan.operators.traced.stage_cuts import tied_parameter
from workbench.plan.operators.traced.traced_graph import TracedGraph
from workbench.plan.operators.traced.traced_json import TracedModel
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.python_model_rules import untraced
from workbench.plan.rules.strategy.operator_rules import sides
from workbench.plan.rules.supported import require
from workbench.planner.autoshard.for_plans.plan_machine import operator_mesh

TORCH_NAMES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def traced_stages(plan: ResolvedPlan, model: TracedModel) -> TracedStages:
    """A traced module as a complete plan runs it.

    Raises:
        PlanError: An operator has no entry in the table of the cost model.
    """
    pipeline, grid = plan.strategy.pipeline, sides(plan)
    dtype = f"torch.{TORCH_NAMES[plan.strategy.precision]}"
    require_entries(model.graph.nodes)
    count = pipeline.size * pipeline.chunks
    own = planned_graph(factor_graph(model.graph), plan.strategy.operators, grid, count, dtype)
    key = tied_parameter(model.graph, own.stages)
    return TracedStages(
        grid,
        own.factored,
        own.shards,
        own.stored,
        own.stages,
        model.parameters,
        None if key is None else model.graph.parameters[key],
        model.buffer_bytes,
        operator_mesh(plan).redistribution,
    )


def with_traced(
    plan: ResolvedPlan, model: TracedModel | None
) -> tuple[ResolvedPlan, TracedStages | None]:
    """A complete plan, of code with a shape that stands in for it, and the stages of its module.

    Raises:
        PlanError: The plan's model is code, and was not traced or has no estimate.
    """
    if not plan.code:
        return plan, None
    if model is None:
        raise untraced(plan)
    require(plan, "estimate", allow_code=True)
    traced = traced_stages(plan, model)
    return with_stand_in(plan, traced), traced


def with_stand_in(plan: ResolvedPlan, traced: TracedStages) -> ResolvedPlan:
    """The plan with a shape in place of its code, of which the cost model reads no more than what
    the graph does not say otherwise: a layer for each stage, and the width that passes between
    them.
    """
    graph = traced.factored.graph
    shape = Shape(
        name=plan.model_name,
        layers=len(traced.stages),
        hidden=_width(graph),
        heads=1,
        ffn=_width(graph),
        vocab=plan.vocab,
        max_positions=plan.training.sequence_length,
        positions="learned",
        norm="layernorm",
        mlp="gelu",
        tied=traced.tied is not None,
    )
    return plan.with_fields(model=shape.model_dump())


def _width(graph: TracedGraph) -> int:
    """Features of a token behind the embedding."""
    first = next(n for n in graph.nodes if any(ref.source == graph.tokens for ref in n.inputs))
    tokens = math.prod(graph.inputs[graph.tokens].shape)
    return max(1, math.prod(first.outputs[0].shape) // tokens)
