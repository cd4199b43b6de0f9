"""The plans that stages found by the latency model are."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.plan.schema import Plan
from workbench.planner.search.search_space import SearchSpace, plan_with_strategy
from workbench.planner.search.unequal.stages_scan import StagedPlan
from workbench.planner.search.unequal.unequal_space import SCHEDULES
from workbench.planner.unequal_stages.memory import policy_in_flight


def plans_of(space: SearchSpace, staged: StagedPlan) -> Iterator[Plan]:
    """The plan of some stages, with every ZeRO stage of the space."""
    one, setting = staged.combination, staged.combination.setting
    replicas = staged.stages.replicas
    even = len(set(replicas)) == 1 and one.sequences % replicas[0] == 0
    micro_batch = one.sequences // replicas[0] if even else one.sequences
    if micro_batch not in space.micro_batch:
        return
    for zero in space.zero:
        strategy = {
            "tensor": {"size": one.split.tensor, "sequence": one.split.sequence},
            "pipeline": _pipeline(staged, None if even else list(replicas)),
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


def _pipeline(staged: StagedPlan, replicas: list[int] | None) -> dict[str, object]:
    stages, held = staged.stages.stages, staged.stages.in_flight
    if len(stages) == 1:
        return {"replicas": replicas}
    count = staged.combination.microbatches
    usual = [min(k, count) for k in policy_in_flight(len(stages), staged.stages.warm_up)]
    return {
        "size": len(stages),
        "schedule": SCHEDULES[staged.stages.warm_up],
        "partition": [stage.end - stage.first for stage in stages],
        "replicas": replicas,
        "in_flight": list(held) if any(k < least for k, least in zip(held, usual)) else None,
    }
