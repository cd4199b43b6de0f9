"""The plans that stages found by the latency model are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from workbench.plan.schema import Plan
from workbench.planner.search.search_space import SearchSpace, plan_with_strategy
from workbench.planner.search.unequal.staged_plan import StagedPlan
from workbench.planner.search.unequal.unequal_space import SCHEDULES
from workbench.planner.unequal_stages.merged_layers import layers_before


def plans_of(space: SearchSpace, staged: StagedPlan) -> Iterator[Plan]:
    """The plan of some stages, with every ZeRO stage of the space."""
    one, setting = staged.combination, staged.combination.setting
    own = staged.replicas is not None
    micro_batch = one.sequences if own else one.sequences // staged.stages.replicas[0]
    if micro_batch not in space.micro_batch:
        return
    for zero in space.zero:
        strategy = {
            "tensor": {"size": one.split.tensor, "sequence": one.split.sequence},
            "pipeline": _pipeline(staged),
            "recompute": one.split.recompute,
            "data": {"zero": zero},
            "kernels": space.kernels[0],
            "gradient_dtype": space.gradient[0],
        }
        yield plan_with_strategy(
            space,
            strategy,
            micro_batch,
            world_size=setting.world_size,
            gpus_per_node=setting.gpus_per_node,
        )


def _pipeline(staged: StagedPlan) -> dict[str, object]:
    stages = staged.stages.stages
    before = partial(layers_before, staged.combination.layers.profile)
    if len(stages) == 1:
        return {"replicas": staged.replicas}
    return {
        "size": len(stages),
        "schedule": SCHEDULES[staged.stages.warm_up],
        "partition": [before(stage.end) - before(stage.first) for stage in stages],
        "replicas": staged.replicas,
        "in_flight": staged.in_flight,
    }
