"""Stages, submeshes and operator strategies searched together: the best by the latency of 1F1B
become plans, which are estimated and ranked as those of every other space.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from workbench.costmodel.inputs.config import FixedConfig
from workbench.errors import PlanError
from workbench.plan.schema import Plan
from workbench.planner.plan_conditions import Condition
from workbench.planner.search.constraints import RESULT_FIELDS, narrow_space
from workbench.planner.search.joint.joint_plans import recomputed_layers, written
from workbench.planner.search.joint.joint_space import JointChoice, Submesh, submesh_ranks
from workbench.planner.search.joint.stage_division import StageDivision
from workbench.planner.search.joint.stage_pricing import Stage, StagePricing, step_bound
from workbench.planner.search.results.candidate_figures import CandidateFigures
from workbench.planner.search.results.search_result import Candidate
from workbench.planner.search.search_space import SearchSpace, plan_on_gpus
from workbench.planner.search.space_scan import objective_score
from workbench.planner.search.unequal.estimates import estimated_figures, result_of

Progress = Callable[[str], None]
SLACK = 1.2
"""Divisions whose latency is over so many times the least one that fits are not estimated."""
ESTIMATED = 32
"""Divisions, the best by the latency of 1F1B, whose plans are estimated."""
TRIES = 3
"""Divisions of one choice, each within less memory, where the estimate counts more than was
divided by.
"""


@dataclass(frozen=True)
class JointFound:
    """Plans that were found, best first."""

    candidates: tuple[Candidate, ...]
    combinations: int
    """Submeshes, microbatches and ZeRO stages around which stages were divided."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, order=True)
class _Waiting:
    """A choice that waits to be divided into stages, or divided, to be estimated."""

    seconds: float
    """Of a step: a bound, then of its division."""
    order: int
    choice: JointChoice = field(compare=False)
    memory: float = field(compare=False)
    """Bytes of a rank that it is divided within."""
    layers: tuple[int, ...] = field(default=(), compare=False)
    """Of each stage, once divided."""
    tries: int = field(default=0, compare=False)


class JointSearch:
    """One search on one number of GPUs."""

    def __init__(
        self, space: SearchSpace, setting: FixedConfig, beside: CandidateFigures, objective: str
    ) -> None:
        self.space, self.setting, self.beside = space, setting, beside
        self.objective = objective
        self.pricing = StagePricing(plan_on_gpus(space.base, setting), setting)
        self.candidates: list[Candidate] = []

    def run(self, progress: Progress) -> int:
        """Estimate the best divisions; answers how many choices there were.

        A choice waits by a bound of its step, then by its division's, then for its estimate.
        """
        waiting, least, estimated = list(self._bounded()), math.inf, 0
        choices = len(waiting)
        heapq.heapify(waiting)
        while waiting and estimated < ESTIMATED and waiting[0].seconds < SLACK * least:
            one = heapq.heappop(waiting)
            if one.layers:
                progress(f"estimating, {estimated} plans")
                estimated += 1
                over = self._estimate(one)
                if over <= 0:
                    least = min(least, one.seconds)
                    continue
                one = replace(one, memory=one.memory - over, tries=one.tries + 1)
            if one.tries < TRIES and (divided := self._divided(one)):
                heapq.heappush(waiting, divided)
        return choices

    def _bounded(self) -> Iterator[_Waiting]:
        memory = self.beside.largest_peak_bytes
        for order, choice in enumerate(self._choices()):
            stages = self.setting.world_size // choice.submesh.ranks
            try:
                costs = self.pricing.costs(choice, stages, memory)
            except PlanError:
                continue
            bound = step_bound(costs, stages, choice.microbatches(self.setting.global_batch))
            if math.isfinite(bound):
                yield _Waiting(bound, order, choice, memory)

    def _choices(self) -> Iterator[JointChoice]:
        """Equal submeshes alone, which a plan holds."""
        space, world = self.space, self.setting.world_size
        stages = {pipeline for *_, pipeline in space.schedules}
        for ranks in submesh_ranks(world, self.setting.gpus_per_node):
            if world // ranks not in stages:
                continue
            for tensor in (t for t in space.tensor if isinstance(t, int) and ranks % t == 0):
                submesh = Submesh(tensor, ranks // tensor)
                for sequences in space.micro_batch:
                    if self.setting.global_batch % (sequences * submesh.replicas) == 0:
                        # ZeRO-2 keeps what ZeRO-1 keeps where gradients are reduced once a step.
                        yield from (
                            JointChoice(submesh, sequences, zero)
                            for zero in space.zero
                            if zero == 0 or (zero != 2 and submesh.replicas > 1)
                        )

    def _divided(self, one: _Waiting) -> _Waiting | None:
        stages = self.setting.world_size // one.choice.submesh.ranks
        costs = self.pricing.costs(one.choice, stages, one.memory)
        microbatches = one.choice.microbatches(self.setting.global_batch)
        # In units of the submesh, which all stages have.
        best = StageDivision({1: costs}, stages, microbatches).best()
        return None if best is None else replace(one, seconds=best.seconds, layers=best.layers)

    def _estimate(self, one: _Waiting) -> float:
        """Keep its plans within the risk; bytes by which the leanest is over it."""
        stages, limit = self._stages(one), self.beside.largest_peak_bytes
        over = math.inf
        for recompute in recomputed_layers(stages):
            if isinstance(recompute, str) and recompute not in self.space.recompute:
                continue
            try:
                plan = written(self.space, self.setting, one.choice, stages, recompute)
                seconds, compute, peak = estimated_figures(plan.resolve())
            except PlanError:
                continue
            over = min(over, peak - limit)
            if peak <= limit:
                self.candidates.append(self._candidate(plan, seconds, compute, peak))
        return over

    def _stages(self, one: _Waiting) -> list[Stage]:
        return self.pricing.stages(one.choice, one.layers, one.memory)

    def _candidate(self, plan: Plan, seconds: float, compute: float, peak: float) -> Candidate:
        expected = np.array(seconds * self.beside.slowdown(peak))
        score = objective_score(self.setting, self.objective, expected, np.array(compute))
        return self.beside.candidate(plan, seconds, peak, float(score))


def search_joint(
    whole: SearchSpace, constraints: Sequence[Condition], objective: str, progress: Progress
) -> JointFound:
    """The plans of a space that meet the conditions, best first."""
    space, beside = narrow_space(whole, constraints), CandidateFigures(whole)
    results = [c for c in constraints if c.field in RESULT_FIELDS]
    candidates, choices = [], 0
    for setting in space.fixed_configs:
        search = JointSearch(space, setting, beside, objective)
        choices += search.run(progress)
        candidates += search.candidates
    kept = [one for one in candidates if all(c.holds(result_of(one, c.field)) for c in results)]
    return JointFound(tuple(sorted(kept, key=lambda c: (c.score, c.peak_bytes))), choices)
