"""The space of pipeline stages, submeshes and operator strategies (Alpa, arXiv:2201.12023)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate

from workbench.errors import PlanError, refuse
from workbench.plan.operators.strategy_form import read_strategies
from workbench.plan.rules import legal_sizes
from workbench.plan.schema import AXES, Plan
from workbench.planner.autoshard.for_plans.stage_graph import leading_layers
from workbench.planner.autoshard.layer_operators import model_graph
from workbench.planner.autoshard.strategy_search.pinned_strategies import layer_runs, unknown_pins
from workbench.planner.search.search_space import SearchSpace, search_space


def joint_space(plan: Plan, worlds: tuple[int, ...] = ()) -> SearchSpace:
    """The space around a plan: its model, GPUs, batch and precision stay, and so does what its
    `strategy.operators` names; the rest of its strategy is free.

    Raises:
        PlanError: The model has no operators of its own strategies, or a pattern names none.
    """
    usual = search_space(plan, "default", worlds)
    if usual.base.shape.mla is not None:
        raise refuse(
            "--space",
            f"is 'operators', and {usual.base.shape.name} has model.mla, which this version does "
            "not run; legal: default, wide or vast, or a model of other attention",
        )
    if plan.lora is not None:
        raise refuse(
            "--space",
            "is 'operators', and finetune.lora adds adapters, beside which no operator has a "
            "strategy of its own; legal: default, wide or vast, or finetune.method: full",
        )
    _check_pins(plan, usual)
    most = min(usual.base.shape.layers, max(s.world_size for s in usual.fixed_configs))
    return replace(
        usual,
        schedules=(
            *(("1f1b", 1, stages) for stages in range(1, most + 1)),
            *(one for one in usual.schedules if one[0] != "1f1b"),
        ),
        sequence=(False,),
        context=(1,),
        expert=(1,),
        placement=(tuple(AXES),),
        recompute=("none", "selective", "full"),
        offload=("none",),
        tile_factor=(1,),
        micro_batch=tuple(b for b in legal_sizes.divisors(usual.batch) if b <= MAX_SEQUENCES),
    )


def _check_pins(plan: Plan, usual: SearchSpace) -> None:
    """Every pattern of the plan's `strategy.operators` names operators of all layers alike."""
    shape, fixed = usual.base.shape, read_strategies(plan.strategy.operators)
    graph = model_graph(shape, 1, usual.base.training.sequence_length, fused=True)
    modules = [module for operator in graph.operators for module in operator.modules]
    runs = layer_runs(modules, shape.layers, fixed)
    if {*accumulate(runs[:-1])} - {leading_layers(shape)}:
        what = "has patterns that tell layers apart, but layers of a stage are searched as alike"
        raise refuse("strategy.operators", f"{what}; legal: patterns of all layers, blocks.*.NAME")
    if unknown := unknown_pins(graph, fixed):
        raise PlanError(unknown)
    if shape.tied and any(fnmatchcase("embedding.tokens", pattern) for pattern in fixed):
        what = "is the weight of the tied head, as which it is split; legal: a strategy of head"
        raise refuse("strategy.operators.embedding.tokens", what)


MAX_SEQUENCES = 16
"""Of a microbatch on the tensor ranks of one replica."""


@dataclass(frozen=True)
class Submesh:
    """Ranks of one stage: replicas, over which rows are split, of ranks among which the operators'
    strategies are free.
    """

    tensor: int
    replicas: int

    @property
    def ranks(self) -> int:
        """Of the stage."""
        return self.tensor * self.replicas


def submesh_ranks(world: int, node: int) -> tuple[int, ...]:
    """Legal ranks of a stage: 1, 2, 4, .. a node, then whole nodes (Alpa, section 5.2)."""
    inside = [ranks for ranks in legal_sizes.divisors(node) if ranks <= world]
    nodes = [node * count for count in range(2, world // node + 1)]
    return tuple(ranks for ranks in (*inside, *nodes) if world % ranks == 0)


@dataclass(frozen=True)
class JointChoice:
    """What is tried around one division into stages."""

    submesh: Submesh
    sequences: int
    """Of a microbatch on one replica."""
    zero: int
    schedule: str = "1f1b"
    chunks: int = 1
    """Stages of a rank."""

    def microbatches(self, batch: int) -> int:
        """Of a step of `batch` sequences."""
        return batch // (self.sequences * self.submesh.replicas)
