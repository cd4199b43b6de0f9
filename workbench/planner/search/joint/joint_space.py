"""The space of pipeline stages, submeshes and operator strategies (Alpa, arXiv:2201.12023)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from workbench.errors import refuse
from workbench.plan.rules import legal_sizes
from workbench.plan.schema import AXES, Plan
from workbench.planner.search.search_space import SearchSpace, search_space


def joint_space(plan: Plan, worlds: tuple[int, ...] = ()) -> SearchSpace:
    """The space around a plan: its model, GPUs, batch and precision stay, its strategy is free.

    Raises:
        PlanError: The model has no operators of its own strategies.
    """
    usual = search_space(plan, "default", worlds)
    for field in ("moe", "mla"):
        if getattr(usual.base.shape, field) is not None:
            raise refuse(
                "--space",
                f"is 'operators', and {usual.base.shape.name} has model.{field}; legal: default, "
                "wide or vast, or a model of dense layers",
            )
    most = min(usual.base.shape.layers, max(s.world_size for s in usual.fixed_configs))
    return replace(
        usual,
        schedules=tuple(("1f1b", 1, stages) for stages in range(1, most + 1)),
        sequence=(False,),
        context=(1,),
        expert=(1,),
        placement=(tuple(AXES),),
        recompute=("none", "selective", "full"),
        offload=("none",),
        micro_batch=tuple(b for b in legal_sizes.divisors(usual.batch) if b <= MAX_SEQUENCES),
    )


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

    def microbatches(self, batch: int) -> int:
        """Of a step of `batch` sequences."""
        return batch // (self.sequences * self.submesh.replicas)
