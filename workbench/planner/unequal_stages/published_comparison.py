"""Plans on DAPPLE's published layer profiles (2007.01045): the search's, the published ones, and
those of simpler planners. Speed-ups over one device, by the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.errors import PlanError
from workbench.plan.model.layer_profile import LayerProfile
from workbench.planner.unequal_stages.baselines import (
    data_parallel_seconds,
    gpipe_stages,
    pipedream_stages,
)
from workbench.planner.unequal_stages.memory import peak_bytes
from workbench.planner.unequal_stages.plan import UnequalPlan, evaluate
from workbench.planner.unequal_stages.published_plans import (
    MODELS,
    TOPOLOGY,
    published_batch,
    published_profile,
    published_stages,
)
from workbench.planner.unequal_stages.search import search_stages
from workbench.planner.unequal_stages.simulated import simulated_gpipe
from workbench.planner.unequal_stages.stage_times import (
    Batch,
    Stage,
    one_device_seconds,
    stage_times,
)
from workbench.planner.unequal_stages.topology import Topology

PUBLISHED_CLAIMS = (
    "published: up to 3.23 x the throughput of PipeDream's plans; 1.6 x GPipe's, in 12 % less "
    "memory (2007.01045)"
)
FOUND = 3
"""A published plan among so many of the search's best is found."""


@dataclass(frozen=True)
class ComparedPlan:
    """One planner's plan; figures are None where it does not fit memory or the microbatch."""

    planner: str
    speed_up: float | None
    """Over one device."""
    stages: str = ""
    """Replicas and last layer of each."""
    warm_up: str = ""
    activation_communication_ratio: float | None = None
    memory: float | None = None
    """Bytes of the device that needs most."""
    microbatches: int | None = None


@dataclass(frozen=True)
class Comparison:
    """The plans for one model, and how the published one relates to the search's best."""

    model: str
    plans: tuple[ComparedPlan, ...]
    place: int | None
    """Of the published plan among the search's ten best, from 1; None where it is not there."""
    explained: str
    """In which terms the published plan differs from the search's best; empty if it is found."""


def compare_published(model: str, whole_sequences: bool) -> Comparison:
    """Plans for `model` (of `MODELS`) and its published global batch: each planner's best over any
    number of microbatches of whole sequences, or at the published number, shared evenly.
    """
    profile, batches = published_profile(model), _batches(model, whole_sequences)
    found = searched(profile, batches)
    published = _best(profile, published_stages(model, "DAPPLE"), batches)
    pipelines = {
        "search": found[0],
        "DAPPLE, published": published,
        "PipeDream, published": _best(profile, published_stages(model, "PipeDream"), batches),
        "PipeDream's algorithm": _best(profile, pipedream_stages(profile, TOPOLOGY), batches),
    }
    plans = [_compared(name, profile, plan) for name, plan in pipelines.items()]
    plans.append(_gpipe(profile, batches))
    for overlap in (False, True):
        plans.append(_data_parallel(profile, batches[0], overlap))
    places = [i for i, plan in enumerate(found, 1) if published and plan.stages == published.stages]
    place = min(places, default=None)
    known = place is not None and place <= FOUND
    explained = "" if known or published is None else _difference(found[0], published)
    return Comparison(model, tuple(plans), place, explained)


def one_way_speed_ups(model: str, whole_sequences: bool) -> tuple[float, float | None]:
    """Speed-ups of the search's and the published plan if activations crossed the network one way
    alone: so the authors' search for two stages (orchestrate_async.rs, compute_bipartition) counts
    a cut, without gradients.
    """
    topology = replace(TOPOLOGY, network_rate=2 * TOPOLOGY.network_rate)
    profile, batches = published_profile(model), _batches(model, whole_sequences)
    best = max(plan.speed_up for plan in searched(profile, batches, topology))
    published = _best(profile, published_stages(model, "DAPPLE"), batches, topology)
    return best, published.speed_up if published else None


def searched(
    profile: LayerProfile, batches: Sequence[Batch], topology: Topology = TOPOLOGY
) -> list[UnequalPlan]:
    """The search's ten best over all `batches`, by the simulator; those that fit nothing are left
    out.
    """
    plans: list[UnequalPlan] = []
    for batch in batches:
        try:
            plans += search_stages(profile, topology, batch)
        except PlanError:
            continue
    return sorted(plans, key=lambda plan: plan.simulated)[:10]


def _batches(model: str, whole_sequences: bool) -> list[Batch]:
    known = MODELS[model]
    most = known.global_batch // known.microbatch
    counts = [n for n in range(1, most + 1) if most % n == 0] if whole_sequences else [most]
    return [published_batch(model, count, whole_sequences) for count in counts]


def _best(
    profile: LayerProfile,
    stages: Sequence[Stage],
    batches: Sequence[Batch],
    topology: Topology = TOPOLOGY,
) -> UnequalPlan | None:
    plans = [evaluate(profile, stages, topology, batch) for batch in batches]
    return min((p for p in plans if p is not None), key=lambda p: p.simulated, default=None)


def _compared(planner: str, profile: LayerProfile, plan: UnequalPlan | None) -> ComparedPlan:
    if plan is None:
        return ComparedPlan(planner, None)
    return ComparedPlan(
        planner,
        plan.speed_up,
        _stages_text(profile, plan.stages),
        plan.warm_up,
        plan.times.activation_communication_ratio,
        plan.memory,
        plan.batch.microbatches,
    )


def _stages_text(profile: LayerProfile, stages: Sequence[Stage]) -> str:
    if len(stages) > 4:
        return " : ".join(str(stage.replicas) for stage in stages)
    ends = (profile.layers[stage.end - 1].name for stage in stages)
    return " | ".join(f"{stage.replicas} to {end}" for stage, end in zip(stages, ends))


def _gpipe(profile: LayerProfile, batches: Sequence[Batch]) -> ComparedPlan:
    """One device a stage, all forwards first: the fastest number of microbatches that fits, else
    the fastest of all.
    """
    stages = gpipe_stages(profile, TOPOLOGY)
    found = []
    for batch in batches:
        times = stage_times(profile, stages, TOPOLOGY, batch)
        memory = peak_bytes(profile, stages, [batch.microbatches] * len(stages), batch)
        seconds = simulated_gpipe(times, batch.microbatches).makespan
        found.append((memory > TOPOLOGY.memory, seconds, memory, batch.microbatches))
    over, seconds, memory, count = min(found)
    name = "GPipe, straight" + (", over memory" if over else "")
    speed_up = one_device_seconds(profile, batches[0]) / seconds
    return ComparedPlan(
        name, speed_up, _stages_text(profile, stages), memory=memory, microbatches=count
    )


def _data_parallel(profile: LayerProfile, batch: Batch, overlap: bool) -> ComparedPlan:
    seconds = data_parallel_seconds(profile, TOPOLOGY, batch, overlap)
    name = "data parallel" + (", overlapped" if overlap else "")
    return ComparedPlan(name, one_device_seconds(profile, batch) / seconds if seconds else None)


def _difference(best: UnequalPlan, published: UnequalPlan) -> str:
    """Terms in which two plans differ, in seconds of a step."""
    words = []
    for name, plan in (("search", best), ("published", published)):
        both = [f + b for f, b in zip(plan.times.forward, plan.times.backward)]
        count = plan.batch.microbatches
        words.append(
            f"{name}: M {count} x slowest stage {count * max(both[::2]):.3f} s, x slowest "
            f"transfer there and back {count * max(both[1::2], default=0.0):.3f} s, way down and "
            f"up {sum(both):.3f} s, longest all-reduce {max(plan.times.all_reduce):.3f} s, step "
            f"{plan.simulated:.3f} s"
        )
    return "; ".join(words)
