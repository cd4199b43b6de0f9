"""Stages, submeshes and operator strategies searched together: the best divisions become plans,
which are estimated and ranked as those of every other space.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from workbench.costmodel.inputs.config import FixedConfig
from workbench.errors import PlanError
from workbench.plan.schema import Plan
from workbench.planner.plan_conditions import Condition
from workbench.planner.search.constraints import RESULT_FIELDS, narrow_space
from workbench.planner.search.joint.choice_pricing import ChoicePricing
from workbench.planner.search.joint.choice_search import Divided, best_division
from workbench.planner.search.joint.equal_stages import EqualStages
from workbench.planner.search.joint.joint_plans import written
from workbench.planner.search.joint.joint_space import JointChoice, Submesh, submesh_ranks
from workbench.planner.search.joint.stage_lines import StageLines
from workbench.planner.search.results.candidate_figures import CandidateFigures
from workbench.planner.search.results.search_result import Candidate
from workbench.planner.search.search_space import SearchSpace
from workbench.planner.search.space_scan import objective_score
from workbench.planner.search.unequal.estimates import estimated_figures, result_of
from workbench.schedules.generators import SCHEDULES
from workbench.units import GIB

Progress = Callable[[str], None]
ESTIMATED = 32
"""Divisions, the best by their figures, whose plans are written."""
LESS = GIB / 16
"""Memory by which the next division has less."""
FREE = 1.0005
"""Slow-down of a nearly full GPU below which less memory wins nothing."""


@dataclass(frozen=True)
class JointFound:
    """Plans that were found, best first."""

    candidates: tuple[Candidate, ...]
    combinations: int
    """Submeshes, microbatches and ZeRO stages around which stages were divided."""
    plans: int
    """Of their best divisions, estimated."""
    notes: tuple[str, ...] = ()


ONE_STAGE_A_RANK = {False: "1f1b", True: "zb-h1"}
"""Whether backward is split -> a schedule by which stages are priced: the gradients of a split one
add up in its GEMMs, which is quicker.
"""


@dataclass(frozen=True, order=True)
class _Bounded:
    """A choice with seconds that no step of it is below."""

    seconds: float
    order: int
    choice: JointChoice = field(compare=False)


@dataclass(frozen=True, order=True)
class _Found:
    """Stages with the seconds that are expected of their step."""

    expected: float
    order: int
    choice: JointChoice = field(compare=False)
    divided: Divided | EqualStages = field(compare=False)


class JointSearch:
    """One search on one number of GPUs."""

    def __init__(
        self, space: SearchSpace, setting: FixedConfig, beside: CandidateFigures, objective: str
    ) -> None:
        self.space, self.setting, self.beside = space, setting, beside
        self.objective = objective
        self.pricing = ChoicePricing(space, setting)
        self.found: list[_Found] = []
        self.candidates: list[Candidate] = []
        self.tried = 0
        self.schedules: dict[int, list[tuple[str, int]]] = {}
        for schedule, chunks, stages in space.schedules:
            self.schedules.setdefault(stages, []).append((schedule, chunks))
        self.refused: PlanError | None = None

    def run(self, progress: Progress) -> int:
        """Estimate the best divisions; answers how many choices were divided.

        A choice waits by a bound of its step: those behind the best that was found are left out.
        """
        waiting = sorted(self._bounded(progress))
        if not waiting and self.refused and self.pricing.pinned:
            raise self.refused
        for done, one in enumerate(waiting):
            if one.seconds >= self._least:
                break
            progress(f"dividing layers, {done} of {len(waiting)} choices")
            self._divide(one.choice)
        for done, found in enumerate(sorted(self.found)[:ESTIMATED]):
            progress(f"estimating, {done} plans")
            self._estimate(found)
        return self.tried

    @property
    def _least(self) -> float:
        return min((one.expected for one in self.found), default=math.inf)

    def _bounded(self, progress: Progress) -> Iterator[_Bounded]:
        """Choices by a bound, which those of as many tensor ranks and sequences have lines for."""
        known: dict[tuple[int, int, bool, str], list[StageLines]] = {}
        for order, choice in enumerate(self._choices()):
            progress(f"bounding choices, {order}")
            stages = self.setting.world_size // choice.submesh.ranks
            microbatches = choice.microbatches(self.setting.global_batch)
            for schedule, chunks in self.schedules[stages]:
                splits = SCHEDULES[schedule].splits_backward and stages > 1
                alike = ONE_STAGE_A_RANK[splits]
                key = choice.submesh.tensor, choice.sequences, stages > 1, alike
                try:
                    known[key] = lines = known.get(key) or self.pricing.lines(
                        replace(choice, schedule=alike)
                    )
                except PlanError as error:
                    self.refused = error
                    continue
                least = min(own.least_seconds() for own in lines) / stages
                filling = 0.0 if splits else (stages - 1) / chunks  # W fills the bubble
                own = replace(choice, schedule=schedule, chunks=chunks)
                yield _Bounded(least * (microbatches + filling), order, own)

    def _choices(self) -> Iterator[JointChoice]:
        """Equal submeshes alone, which a plan holds, without ZeRO, whatever their schedule."""
        space, world = self.space, self.setting.world_size
        for ranks in submesh_ranks(world, self.setting.gpus_per_node):
            if world // ranks not in self.schedules:
                continue
            for tensor in (t for t in space.tensor if isinstance(t, int) and ranks % t == 0):
                submesh = Submesh(tensor, ranks // tensor)
                for sequences in space.micro_batch:
                    if self.setting.global_batch % (sequences * submesh.replicas) == 0:
                        yield JointChoice(submesh, sequences, 0)

    def _divide(self, choice: JointChoice) -> None:
        """Keep its best divisions, for every ZeRO stage."""
        for zero in self.space.zero:
            microbatches = choice.microbatches(self.setting.global_batch)
            if zero and (choice.submesh.replicas == 1 or (zero == 2 and microbatches > 1)):
                # ZeRO-2 keeps what ZeRO-1 keeps where gradients add up over microbatches.
                continue
            own = replace(choice, zero=zero)
            try:
                self._try(own)
            except PlanError:
                continue
            self.tried += 1

    def _try(self, choice: JointChoice) -> None:
        if choice.schedule != "1f1b":
            division, variants = self.pricing.equal_division(choice)
            limit = self.beside.largest_peak_bytes
            for found in division.within(variants, limit, self._least):
                self._keep(choice, found)
            return
        for lines in self.pricing.lines(choice):
            lines.drop_worse(self._least)
            if lines.variants and lines.least_bytes() <= self.beside.largest_peak_bytes:
                self._within_limits(choice, lines)

    def _keep(self, choice: JointChoice, found: Divided | EqualStages) -> float:
        """Answers how much slower a GPU as full is."""
        slowdown = self.beside.slowdown(found.peak)
        expected = found.seconds * slowdown
        self.found.append(_Found(expected, len(self.found), choice, found))
        return slowdown

    def _within_limits(self, choice: JointChoice, lines: StageLines) -> None:
        """Its divisions, each within less memory than the one before: nearly full GPUs are slow."""
        free, limit = best_division(lines, math.inf), self.beside.largest_peak_bytes
        if free is None or free.seconds >= self._least:
            return
        while divided := best_division(lines, limit):
            slowdown = self._keep(choice, divided)
            if slowdown < FREE or divided.seconds >= self._least:
                return
            limit = divided.peak - LESS

    def _estimate(self, found: _Found) -> None:
        try:
            plan = written(self.space, self.setting, found.choice, found.divided.stages)
            seconds, compute, peak = estimated_figures(plan.resolve())
        except PlanError:
            return
        most = self.beside.largest_peak_bytes
        if peak <= most:
            reason = found.divided.reason(most)
            self.candidates.append(self._candidate(plan, seconds, compute, peak, reason))

    def _candidate(
        self, plan: Plan, seconds: float, compute: float, peak: float, reason: str
    ) -> Candidate:
        expected = np.array(seconds * self.beside.slowdown(peak))
        score = objective_score(self.setting, self.objective, expected, np.array(compute))
        return self.beside.candidate(plan, seconds, peak, float(score), reason=reason)


def search_joint(
    whole: SearchSpace, constraints: Sequence[Condition], objective: str, progress: Progress
) -> JointFound:
    """The plans of a space that meet the conditions, best first."""
    space, beside = narrow_space(whole, constraints), CandidateFigures(whole)
    results = [c for c in constraints if c.field in RESULT_FIELDS]
    candidates: list[Candidate] = []
    choices = 0
    for setting in space.fixed_configs:
        search = JointSearch(space, setting, beside, objective)
        choices += search.run(progress)
        candidates += search.candidates
    kept = [one for one in candidates if all(c.holds(result_of(one, c.field)) for c in results)]
    best_first = tuple(sorted(kept, key=lambda c: (c.score, c.peak_bytes)))
    return JointFound(best_first, choices, len(candidates))
