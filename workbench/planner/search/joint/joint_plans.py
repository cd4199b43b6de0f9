"""The plans that stages with operator strategies are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from workbench.costmodel.inputs.config import FixedConfig
from workbench.errors import PlanError
from workbench.plan.operators.layer_patterns import joined_layers
from workbench.plan.operators.strategy_form import parse_strategy, strategy_text
from workbench.plan.schema import Plan
from workbench.planner.autoshard.for_plans.written_plan import plan_with
from workbench.planner.autoshard.plan_problem import choose_for_plan
from workbench.planner.search.joint.joint_space import JointChoice
from workbench.planner.search.joint.stage_choices import of_layers
from workbench.planner.search.joint.stage_estimates import Stage
from workbench.planner.search.search_space import SearchSpace, plan_with_strategy

TABLE = "embedding.tokens"


def with_tied_table(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Stages of a model whose head is tied to its embedding: both are split alike."""
    first, head = stages[0], stages[-1].strategies["head"]
    (*rows, inner), (_, columns) = parse_strategy(head, "strategy.operators.head")
    table, tokens, *_ = parse_strategy(first.strategies[TABLE], TABLE)
    if table == (columns, inner) and (*tokens, 1)[:2] == (*rows, 1)[:2]:
        return tuple(stages)  # whose own strategy may say how its output is split, too
    text = strategy_text(((columns, inner), tuple(rows)))
    return replace(first, strategies={**first.strategies, TABLE: text}), *stages[1:]


def operator_strategies(stages: Sequence[Stage]) -> dict[str, str]:
    """Module pattern -> strategy: of the layers by their stage, of the ends by the first and
    last.
    """
    starts = accumulate((stage.layers for stage in stages), initial=0)
    blocks = dict(
        each
        for start, stage in zip(starts, stages)
        for each in of_layers(stage.strategies.items(), start, stage.layers)
    )
    ends = {**stages[-1].strategies, **stages[0].strategies}
    return joined_layers(blocks) | {m: s for m, s in ends.items() if not m.startswith("blocks.")}


def recomputed_layers(stages: Sequence[Stage]) -> str | list[int]:
    """What `recompute` is: the first layers of each stage that it recomputes."""
    starts = accumulate((stage.layers for stage in stages), initial=0)
    found = [
        layer
        for start, stage in zip(starts, stages)
        for layer in range(start, start + stage.recomputed)
    ]
    if len(found) == sum(stage.layers for stage in stages):
        return "full"
    return found or "none"


def bare_plan(
    space: SearchSpace, setting: FixedConfig, choice: JointChoice, stages: int, **strategy: Any
) -> Plan:
    """The plan of equal submeshes without operator strategies: its ranks have a data and a tensor
    axis.

    Raises:
        PlanError: No plan has these sizes.
    """
    fields: dict[str, Any] = {
        "tensor": {"size": choice.submesh.tensor},
        "pipeline": {"size": stages, "schedule": choice.schedule, "chunks": choice.chunks},
        "data": {"zero": choice.zero},
        "kernels": space.kernels[0],
        "gradient_dtype": space.gradient[0],
    }
    return plan_with_strategy(
        space,
        fields | strategy,
        choice.sequences,
        world_size=setting.world_size,
        gpus_per_node=setting.gpus_per_node,
    )


def written(
    space: SearchSpace, setting: FixedConfig, choice: JointChoice, stages: Sequence[Stage]
) -> Plan:
    """The plan of these stages.

    Raises:
        PlanError: The strategies have no plan.
    """
    partition = [stage.layers for stage in stages]
    size = len(partition) // choice.chunks
    plan = bare_plan(space, setting, choice, size, recompute=recomputed_layers(stages))
    if partition[1:]:
        plan = plan.replace(**{"strategy.pipeline.partition": partition})
    if choice.submesh.tensor == 1:
        return plan
    strategies = operator_strategies(stages)
    try:
        return plan.replace(**{"strategy.operators": strategies})
    except PlanError:
        return _with_other_ends(plan, strategies, choice)


def _with_other_ends(plan: Plan, strategies: Mapping[str, str], choice: JointChoice) -> Plan:
    """With strategies of the model's ends that cost least beside those of the layers."""
    layers = {m: s for m, s in strategies.items() if m.startswith("blocks.")}
    pinned = plan.replace(**{"strategy.operators": layers}).resolve()
    found = choose_for_plan(pinned, choice.submesh.tensor, sequences=choice.sequences)
    return plan_with(plan, found)
