"""The space of pipeline stages that are cut, replicated and placed each by itself (DAPPLE,
2007.01045), composed with tensor-parallel size, recomputation and number of microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from workbench.costmodel.inputs.config import FixedConfig
from workbench.machine.hardware import GPU
from workbench.plan.model.layer_profile_file import profiled_model
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules import legal_sizes
from workbench.plan.schema import AXES, Plan
from workbench.planner.search.search_space import (
    SearchSpace,
    neutral_plan,
    search_space,
    wanted_global_batch,
)

SCHEDULES = {"PA": "1f1b", "PB": "eager-1f1b"}
"""Warm-up policy of DAPPLE -> the schedule of that name here."""


def unequal_space(plan: Plan, worlds: tuple[int, ...] = ()) -> SearchSpace:
    """The space around a plan: its model, GPUs, batch and precision stay, its strategy is free."""
    if profiled_model(plan.model):
        return profile_space(plan, worlds)
    usual = search_space(plan, "default", worlds)
    return replace(
        usual,
        schedules=_schedules(min(usual.base.shape.layers, _most_gpus(usual))),
        zero=(0, 1),
        context=(1,),
        expert=(1,),
        placement=(tuple(AXES),),
        micro_batch=tuple(legal_sizes.divisors(usual.batch)),
        recompute=("none", "selective", "full"),
        offload=("none",),
    )


def profile_space(plan: Plan, worlds: tuple[int, ...] = ()) -> SearchSpace:
    """The same of a plan whose model is a layer profile: its layers take what was measured, so
    that nothing but the stages and the number of microbatches is free.
    """
    worlds = worlds or (plan.cluster.gpus,)
    bases = [neutral_plan(plan, world) for world in worlds]
    batch = wanted_global_batch(plan, max(worlds))
    sizes = [JobSize.of(base, batch) for base in bases]
    return SearchSpace(
        asked=plan,
        base=bases[0],
        batch=batch,
        # What is asked of them where no shape is known.
        fixed_configs=cast("tuple[FixedConfig, ...]", tuple(sizes)),
        schedules=_schedules(min(len(bases[0].layer_profile.layers), max(worlds))),
        zero=(0,),
        tensor=(1,),
        algorithm=("1d",),
        kernels=("eager",),
        context=(1,),
        expert=(1,),
        placement=(tuple(AXES),),
        micro_batch=tuple(legal_sizes.divisors(batch)),
        recompute=("none",),
        sequence=(False,),
        shard=("all",),
        offload=("none",),
        reduce=("step",),
        reduce_as_offloaded=False,
        keep_gathered=(False,),
        tile_factor=(1,),
        overlap=(True,),
        bucket_mib=(plan.strategy.data.bucket_mib,),
        gradient=(plan.strategy.gradient_dtype,),
    )


def _most_gpus(space: SearchSpace) -> int:
    return max(setting.world_size for setting in space.fixed_configs)


def _schedules(most: int) -> tuple[tuple[str, int, int], ...]:
    """1F1B by both policies, of so many stages at most."""
    stages = range(2, most + 1)
    return (("1f1b", 1, 1), *((name, 1, n) for n in stages for name in SCHEDULES.values()))


@dataclass(frozen=True)
class JobSize:
    """GPUs and batch of a job, by the names of `FixedConfig`, whose shape a layer profile lacks."""

    world_size: int
    gpus_per_node: int
    global_batch: int
    sequence_length: int
    gpu: GPU

    @staticmethod
    def of(base: ResolvedPlan, batch: int) -> JobSize:
        """Those of a complete plan, with a global batch of `batch` sequences."""
        length, node = base.training.sequence_length, base.cluster.gpus_per_node
        return JobSize(base.world_size, node, batch, length, base.gpu)
