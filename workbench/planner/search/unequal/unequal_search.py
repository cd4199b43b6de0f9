"""The search of the unequal space: stages by DAPPLE's latency model, the best of them as plans that
are estimated and ranked as those of every other space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

from workbench.costmodel.inputs.config import FixedConfig
from workbench.plan.model.layer_profile import LayerProfile
from workbench.planner.plan_conditions import Condition
from workbench.planner.search.constraints import RESULT_FIELDS, narrow_space
from workbench.planner.search.results.candidate_figures import (
    CandidateFigures,
    Figures,
    ProfileFigures,
)
from workbench.planner.search.results.pareto_front import unbeaten
from workbench.planner.search.results.search_result import Candidate
from workbench.planner.search.results.strategy_summary import by_stage
from workbench.planner.search.search_space import SearchSpace
from workbench.planner.search.unequal.combinations import Combinations, microbatch_counts
from workbench.planner.search.unequal.estimates import Estimates
from workbench.planner.search.unequal.staged_plan import StagedPlan
from workbench.planner.search.unequal.stages_scan import (
    Estimate,
    StagesScan,
    allowed_policies,
    scan_stages,
)
from workbench.planner.unequal_stages.merged_layers import MergedLayers
from workbench.planner.unequal_stages.other_planners import (
    PUBLISHED_CLAIMS,
    PlannerFigures,
    other_planners,
    planner_figures,
)
from workbench.units import GIB

ESTIMATED = 160
"""Stages, the best by the latency model, whose plans are estimated."""
SAID = 0.001
"""Gain of another placement from which on it is said."""
Progress = Callable[[str], None]
"""Called with words about what is being done."""


@dataclass(frozen=True)
class UnequalFound:
    """What a search of the unequal space found, best first."""

    candidates: tuple[Candidate, ...]
    combinations: int
    fitting: int
    """Combinations of tensor size, recomputation and microbatches of which some stages fit."""
    baselines: tuple[PlannerFigures, ...]
    """Other planners on the layers of the first candidate."""
    notes: tuple[str, ...]


def search_unequal(
    whole: SearchSpace, constraints: Sequence[Condition], objective: str, progress: Progress
) -> UnequalFound:
    """The plans of a space that meet the conditions, best first."""
    space = narrow_space(whole, constraints)
    results = [c for c in constraints if c.field in RESULT_FIELDS]
    beside: Figures = ProfileFigures(whole) if whole.base.profiled else CandidateFigures(whole)
    combinations = Combinations(space, _largest_peak(beside, results))
    estimates = Estimates(space, beside, objective, results)
    scans = []
    for setting in space.fixed_configs if _has_values(space) else ():
        scans.append(_scan(combinations, setting, estimates.least_seconds, progress))
        one_gpu = combinations.one_gpu_seconds(setting)
        estimates.take(_chosen(scans[-1]), one_gpu, progress)
    order = sorted(estimates.found, key=lambda found: _rank(found[0]))
    first = order[0][1] if order else None
    return UnequalFound(
        tuple(one for one, _ in order),
        sum(scan.combinations for scan in scans),
        sum(scan.fitting for scan in scans),
        _baselines(combinations, first) if first else (),
        tuple(_notes(scans, first.combination.layers.profile)) if first else (),
    )


def _chosen(scan: StagesScan) -> list[StagedPlan]:
    """What is estimated: the best, and what needs less memory than they do; each plan once."""
    best = scan.plans[:ESTIMATED]
    known = {(one.combination, one.stages.stages) for one in best}
    front = [one for one in scan.lean if (one.combination, one.stages.stages) not in known]
    return [*best, *front]


def _baselines(combinations: Combinations, first: StagedPlan) -> tuple[PlannerFigures, ...]:
    one = first.combination
    batch = one.setting.global_batch
    batches = [one.layers.of(count, batch // count) for count in microbatch_counts(batch)]
    one_gpu = combinations.one_gpu_seconds(one.setting)
    own = planner_figures("the first plan", first.stages, one_gpu)
    return (own, *other_planners(one.layers.profile, one.topology, batches, one_gpu))


def _notes(scans: Sequence[StagesScan], profile: LayerProfile) -> Iterator[str]:
    """What DAPPLE's authors published, layers that are not cut between, and placements that no plan
    can say.
    """
    yield PUBLISHED_CLAIMS
    if isinstance(profile, MergedLayers):
        yield (
            f"stages begin at {len(profile.layers)} of the {profile.cuts[-1]:,} layers alone: runs "
            "of layers that take little are cut nowhere"
        )
    for scan in scans:
        if (other := scan.placed_better) and scan.plans:
            faster = 1 - other.seconds / scan.plans[0].seconds
            if faster < SAID:
                continue
            counts = ", ".join(by_stage(one.counts) for one in other.stages.stages)
            yield (
                f"on ranks that are not contiguous stages would be {faster:.1%} faster than the "
                f"best by the latency model (estimated); a plan cannot place them: replicas on "
                f"each node of stage after stage {counts}"
            )


def _rank(one: Candidate) -> tuple[float, float, float]:
    """What the objective says; of equals the latency model, which knows what overlaps."""
    assert one.stages is not None
    return one.score, one.stages.latency_seconds, one.peak_bytes


def _has_values(space: SearchSpace) -> bool:
    """Whether the conditions leave every knob a value."""
    return all(getattr(space, field.name) != () for field in fields(space))


def _largest_peak(beside: Figures, results: Sequence[Condition]) -> float:
    """Bytes that a rank may peak at: by the risk, and by conditions on the peak."""
    peaks = [c for c in results if c.field == "peak_gib" and c.operator in ("<", "<=")]
    return min([beside.largest_peak_bytes, *(float(c.value) * GIB for c in peaks)])


def _scan(
    combinations: Combinations, setting: FixedConfig, estimate: Estimate, progress: Progress
) -> StagesScan:
    def say(done: int, of: int) -> None:
        progress(f"stages on {setting.world_size} GPUs, {done} of {of} combinations")

    say(0, 1)
    policies = allowed_policies(combinations.space)
    return scan_stages(combinations.on(setting), policies, estimate, say)


def pareto(found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats in both expected time and peak, fastest first."""
    return tuple(unbeaten(found, lambda one: (one.expected_seconds, one.peak_bytes)))
