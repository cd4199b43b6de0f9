"""What other planners make of the layers of a search's first plan: PipeDream's, GPipe's straight
split and data parallelism, each at the number of microbatches that is best for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workbench.planner.search.results.stage_figures import StageBaseline
from workbench.planner.search.unequal.combinations import Combination, microbatch_counts
from workbench.planner.search.unequal.stages_scan import StagedPlan
from workbench.planner.unequal_stages.baselines import (
    data_parallel_seconds,
    gpipe_stages,
    pipedream_stages,
)
from workbench.planner.unequal_stages.memory import peak_bytes
from workbench.planner.unequal_stages.plan import UnequalPlan, evaluate
from workbench.planner.unequal_stages.simulated import simulated_gpipe
from workbench.planner.unequal_stages.stage_times import Batch, stage_times

PUBLISHED = (
    "published of DAPPLE: up to 3.23 x the plans of PipeDream's planner, 1.6 x GPipe's throughput "
    "with 12 % less memory (2007.01045)"
)
MOST_PIPEDREAM = 10**9
"""Work of PipeDream's planner (layers cubed times the squares of both levels' sizes) that is worth
a search's time.
"""


def baselines(first: StagedPlan, one_gpu: float) -> tuple[StageBaseline, ...]:
    """The stages `first`, and each planner's best on the same layers, by the simulator; data
    parallelism in closed form. `one_gpu` are the seconds of the step's compute on one GPU.
    """
    one = first.combination
    batches = [
        one.layers.of(count, one.setting.global_batch // count)
        for count in microbatch_counts(one.setting.global_batch)
    ]
    return (
        _of_plan("the first plan", first.stages, one_gpu),
        *_pipedream(one, batches, one_gpu),
        _gpipe(one, batches, one_gpu),
        *(_data_parallel(one, batches[0], one_gpu, overlap) for overlap in (False, True)),
    )


def _pipedream(
    one: Combination, batches: Sequence[Batch], one_gpu: float
) -> Iterable[StageBaseline]:
    profile, topology = one.layers.profile, one.topology
    work = len(profile.layers) ** 3 * (topology.devices**2 + topology.nodes**2)
    if work > MOST_PIPEDREAM:
        return
    stages = pipedream_stages(profile, topology)
    plans = [evaluate(profile, stages, topology, batch) for batch in batches]
    best = min((p for p in plans if p is not None), key=lambda p: p.simulated, default=None)
    name = "PipeDream's planner"
    yield _of_plan(name, best, one_gpu) if best else _none(name, [s.replicas for s in stages])


def _of_plan(name: str, plan: UnequalPlan, one_gpu: float) -> StageBaseline:
    seconds, count = plan.simulated, plan.batch.microbatches
    return StageBaseline(name, seconds, one_gpu / seconds, plan.memory, count, plan.replicas)


def _none(name: str, replicas: Sequence[int] = ()) -> StageBaseline:
    return StageBaseline(name, None, None, None, None, tuple(replicas))


def _gpipe(one: Combination, batches: Sequence[Batch], one_gpu: float) -> StageBaseline:
    """The straight split, every microbatch's forward before the first backward."""
    profile, topology = one.layers.profile, one.topology
    stages = gpipe_stages(profile, topology)
    found = []
    for batch in batches:
        memory = peak_bytes(profile, stages, [batch.microbatches] * len(stages), batch)
        if memory <= topology.memory:
            times = stage_times(profile, stages, topology, batch)
            seconds = simulated_gpipe(times, batch.microbatches).makespan
            found.append((seconds, memory, batch.microbatches))
    name, replicas = "GPipe's straight split", [1] * len(stages)
    if not found:
        return _none(name, replicas)
    seconds, memory, count = min(found)
    return StageBaseline(name, seconds, one_gpu / seconds, memory, count, tuple(replicas))


def _data_parallel(one: Combination, batch: Batch, one_gpu: float, overlap: bool) -> StageBaseline:
    """Each rank keeps as many sequences at once as memory allows."""
    name = f"data parallelism, all-reduce {'overlapped' if overlap else 'after backward'}"
    replicas = one.topology.world_size
    seconds = data_parallel_seconds(one.layers.profile, one.topology, batch, overlap)
    if seconds is None:
        return _none(name, [replicas])
    return StageBaseline(name, seconds, one_gpu / seconds, None, None, (replicas,))
