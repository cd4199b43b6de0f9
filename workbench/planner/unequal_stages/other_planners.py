"""What other planners make of the same layers: PipeDream's, GPipe's straight split and data
parallelism, each at the number of microbatches that is best for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from workbench.plan.model.layer_profile import LayerProfile
from workbench.planner.unequal_stages.baselines import (
    data_parallel_seconds,
    gpipe_stages,
    pipedream_stages,
)
from workbench.planner.unequal_stages.memory import peak_bytes
from workbench.planner.unequal_stages.plan import UnequalPlan, evaluate
from workbench.planner.unequal_stages.simulated import simulated_gpipe
from workbench.planner.unequal_stages.stage_times import Batch, Stage, stage_times
from workbench.planner.unequal_stages.topology import Topology

PUBLISHED_CLAIMS = (
    "published of DAPPLE: up to 3.23 x the plans of PipeDream's planner, 1.6 x GPipe's throughput "
    "with 12 % less memory (2007.01045)"
)
MOST_PIPEDREAM = 10**9
"""Work of PipeDream's planner (layers cubed times the squares of both levels' sizes) that is worth
a search's time.
"""


@dataclass(frozen=True)
class PlannerFigures:
    """What a planner makes of layers: estimated, pipelines by the simulator."""

    name: str
    seconds: float | None
    """Of a step; None where memory allows none."""
    speed_up: float | None
    memory_bytes: float | None
    """Of state and activations on the rank that needs most."""
    microbatches: int | None
    replicas: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {"source": "estimated", **asdict(self)}


def other_planners(
    profile: LayerProfile, topology: Topology, batches: Sequence[Batch], one_device: float
) -> tuple[PlannerFigures, ...]:
    """Each planner's best over `batches`.

    Args:
        profile: The layers.
        topology: Where they may run.
        batches: A step's sequences in each number of microbatches that may be.
        one_device: Seconds of the step's compute on one device.
    """
    return (
        *_pipedream(profile, topology, batches, one_device),
        _gpipe(profile, topology, batches, one_device),
        *(
            _data_parallel(profile, topology, batches[0], one_device, overlap)
            for overlap in (False, True)
        ),
    )


def planner_figures(name: str, plan: UnequalPlan | None, one_device: float) -> PlannerFigures:
    """Of a pipeline; None is one that fits no memory or microbatch."""
    if plan is None:
        return _none(name)
    seconds, count = plan.simulated, plan.batch.microbatches
    return PlannerFigures(name, seconds, one_device / seconds, plan.memory, count, plan.replicas)


def best_of_stages(
    profile: LayerProfile, stages: Sequence[Stage], topology: Topology, batches: Sequence[Batch]
) -> UnequalPlan | None:
    """The plan of `stages` with the fastest of `batches`, None where none fits."""
    plans = [evaluate(profile, stages, topology, batch) for batch in batches]
    return min((p for p in plans if p is not None), key=lambda p: p.simulated, default=None)


def _pipedream(
    profile: LayerProfile, topology: Topology, batches: Sequence[Batch], one_device: float
) -> Iterable[PlannerFigures]:
    work = len(profile.layers) ** 3 * (topology.devices**2 + topology.nodes**2)
    if work > MOST_PIPEDREAM:
        return
    stages = pipedream_stages(profile, topology)
    best, name = best_of_stages(profile, stages, topology, batches), "PipeDream's planner"
    replicas = [stage.replicas for stage in stages]
    yield planner_figures(name, best, one_device) if best else _none(name, replicas)


def _none(name: str, replicas: Sequence[int] = ()) -> PlannerFigures:
    return PlannerFigures(name, None, None, None, None, tuple(replicas))


def _gpipe(
    profile: LayerProfile, topology: Topology, batches: Sequence[Batch], one_device: float
) -> PlannerFigures:
    """The straight split, every microbatch's forward before the first backward."""
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
    return PlannerFigures(name, seconds, one_device / seconds, memory, count, tuple(replicas))


def _data_parallel(
    profile: LayerProfile, topology: Topology, batch: Batch, one_device: float, overlap: bool
) -> PlannerFigures:
    """Each rank keeps as many sequences at once as memory allows."""
    name = f"data parallelism, all-reduce {'overlapped' if overlap else 'after backward'}"
    seconds = data_parallel_seconds(profile, topology, batch, overlap)
    if seconds is None:
        return _none(name, [topology.world_size])
    replicas = (topology.world_size,)
    return PlannerFigures(name, seconds, one_device / seconds, None, None, replicas)
