"""Plans on DAPPLE's published layer profiles (2007.01045): the search's, the published ones, and
those of simpler planners. Speed-ups over one device, by the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.errors import PlanError
from workbench.plan.model.layer_profile import LayerProfile
from workbench.planner.unequal_stages.other_planners import (
    PlannerFigures,
    best_of_stages,
    other_planners,
    planner_figures,
)
from workbench.planner.unequal_stages.plan import UnequalPlan
from workbench.planner.unequal_stages.published.plans import (
    MODELS,
    TOPOLOGY,
    published_batch,
    published_profile,
    published_stages,
)
from workbench.planner.unequal_stages.search import search_stages
from workbench.planner.unequal_stages.stage_times import Batch, Stage, one_device_seconds
from workbench.planner.unequal_stages.topology import Topology

FOUND = 3
"""A published plan among so many of the search's best is found."""


@dataclass(frozen=True)
class Comparison:
    """The plans for one model, and how the published one relates to the search's best."""

    model: str
    planners: tuple[PlannerFigures, ...]
    """The search first, then DAPPLE's and PipeDream's published plans, then simpler planners."""
    best: UnequalPlan
    published: UnequalPlan | None
    """DAPPLE's; None where it does not fit."""
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
    published = best_of_stages(profile, published_stages(model, "DAPPLE"), TOPOLOGY, batches)
    pipedream = published_stages(model, "PipeDream")
    pipelines = {
        "search": found[0],
        "DAPPLE, published": published,
        "PipeDream, published": best_of_stages(profile, pipedream, TOPOLOGY, batches),
    }
    one = one_device_seconds(profile, batches[0])
    planners = (
        *(planner_figures(name, plan, one) for name, plan in pipelines.items()),
        *other_planners(profile, TOPOLOGY, batches, one),
    )
    places = [i for i, plan in enumerate(found, 1) if published and plan.stages == published.stages]
    place = min(places, default=None)
    known = place is not None and place <= FOUND
    explained = "" if known or published is None else _difference(found[0], published)
    return Comparison(model, planners, found[0], published, place, explained)


def one_way_speed_ups(model: str, whole_sequences: bool) -> tuple[float, float | None]:
    """Speed-ups of the search's and the published plan if activations crossed the network one way
    alone: so the authors' search for two stages (orchestrate_async.rs, compute_bipartition) counts
    a cut, without gradients.
    """
    topology = replace(TOPOLOGY, network_rate=2 * TOPOLOGY.network_rate)
    profile, batches = published_profile(model), _batches(model, whole_sequences)
    best = max(plan.speed_up for plan in searched(profile, batches, topology))
    published = best_of_stages(profile, published_stages(model, "DAPPLE"), topology, batches)
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


def stages_text(model: str, stages: Sequence[Stage]) -> str:
    """Replicas and last layer of each stage; of many stages the replicas alone."""
    if len(stages) > 4:
        return " : ".join(str(stage.replicas) for stage in stages)
    layers = published_profile(model).layers
    return " | ".join(f"{stage.replicas} to {layers[stage.end - 1].name}" for stage in stages)


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
