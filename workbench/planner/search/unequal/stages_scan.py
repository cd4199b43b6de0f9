"""The best stages of every combination of a space by DAPPLE's latency model (2007.01045), those
that a plan can say: ranks in the order of the stages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from workbench.planner.search.search_space import SearchSpace
from workbench.planner.search.unequal.combinations import Combination
from workbench.planner.search.unequal.lean_stages import lean_stages
from workbench.planner.search.unequal.staged_plan import StagedPlan
from workbench.planner.search.unequal.unequal_space import SCHEDULES
from workbench.planner.unequal_stages.memory import WARM_UPS
from workbench.planner.unequal_stages.placements import APPEND, placed
from workbench.planner.unequal_stages.plan import Policies, UnequalPlan, evaluate
from workbench.planner.unequal_stages.prefix_search.transitions import Occupancies
from workbench.planner.unequal_stages.search import Effort, near_best

MARGIN = 1.15
"""Combinations and stages are dropped whose latency is longer than so many times the least seconds
estimated: plans are ranked by their estimates, of which the latency model leaves out more or less.
"""
QUICK = Effort(prefixes=2, layers=(4,), plans=20, near=MARGIN)
"""What is kept of every combination."""
CLOSE = Effort(near=MARGIN)
"""What is kept of the best."""
CLOSELY = 6
"""Combinations that are looked at once more."""
EACH = 6
"""Plans of a combination and a number of stages that go on."""
Progress = Callable[[int, int], None]
"""Called with (combinations done, of)."""
Estimate = Callable[[StagedPlan], float]
"""Seconds of a step as `estimate` says them, infinite where there is no such plan."""


@dataclass(frozen=True)
class StagesScan:
    """What was found on one number of GPUs, the best first."""

    plans: tuple[StagedPlan, ...]
    lean: tuple[StagedPlan, ...]
    """Those that take longer and need less memory."""
    combinations: int
    fitting: int
    """Combinations of which some stages fit and meet the conditions."""
    placed_better: StagedPlan | None
    """The best on ranks that are not contiguous, where it is faster than all that are."""


def allowed_policies(space: SearchSpace) -> Policies:
    """The warm-up policies that the schedules of a space leave to each number of stages."""
    legal = {(name, size) for name, _, size in space.schedules}

    def policies(stages: int) -> Sequence[str]:
        known = WARM_UPS if stages > 1 else WARM_UPS[:1]
        return [one for one in known if (SCHEDULES[one], stages) in legal]

    return policies


def scan_stages(
    combinations: Sequence[Combination], policies: Policies, estimate: Estimate, progress: Progress
) -> StagesScan:
    """The best stages of `combinations`, least bound first, all of one number of GPUs."""
    scan = _Scan(policies, estimate)
    for done, one in enumerate(combinations):
        progress(done, len(combinations))
        if one.least_seconds > scan.best * MARGIN:
            break
        scan.look(one, QUICK)
    for one in sorted(scan.found, key=lambda each: scan.found[each][0].seconds)[:CLOSELY]:
        scan.look(one, CLOSE)
    progress(len(combinations), len(combinations))
    plans = sorted(
        (
            StagedPlan(one, plan)
            for one, each in scan.found.items()
            for plan in _of_each_count(each)
        ),
        key=lambda plan: plan.seconds,
    )
    better, front = scan.anywhere, lean_stages(combinations, policies)
    if better is not None and plans and better.seconds >= plans[0].seconds:
        better = None
    return StagesScan(tuple(plans), tuple(front), len(combinations), len(scan.found), better)


def _of_each_count(plans: Sequence[UnequalPlan]) -> Iterator[UnequalPlan]:
    """The best of every number of stages."""
    seen: Counter[int] = Counter()
    for plan in plans:
        seen[len(plan.stages)] += 1
        if seen[len(plan.stages)] <= EACH:
            yield plan


class _Scan:
    """Plans by combination, and the least seconds known of a plan, by the latency model and
    estimated.
    """

    def __init__(self, policies: Policies, estimate: Estimate) -> None:
        self.policies, self.estimate = policies, estimate
        self.found: dict[Combination, list[UnequalPlan]] = {}
        self.best = math.inf
        self.anywhere: StagedPlan | None = None
        self._occupancies: dict[tuple[int, int], Occupancies] = {}

    def look(self, one: Combination, effort: Effort) -> None:
        """Search the stages of a combination."""
        topology, batch = one.topology, one.batch
        size = (topology.nodes, topology.devices)
        known = self._occupancies.setdefault(size, Occupancies(topology))
        plans = near_best(
            one.layers.profile, topology, batch, effort, self.best * MARGIN, self.policies, known
        )
        plans = [plan for plan in plans if StagedPlan(one, plan).sayable]
        if plans and (self.anywhere is None or plans[0].seconds < self.anywhere.seconds):
            self.anywhere = StagedPlan(one, plans[0])
        if contiguous := self._contiguous(one, [*plans, *self.found.get(one, [])]):
            self.found[one] = contiguous
            if (least := contiguous[0].seconds) < self.best:
                estimated = self.estimate(StagedPlan(one, contiguous[0]))
                self.best = min(self.best, max(least, estimated))

    def _contiguous(self, one: Combination, plans: Iterable[UnequalPlan]) -> list[UnequalPlan]:
        """The same cuts and replicas on ranks in the order of the stages, each once."""
        found: dict[object, UnequalPlan | None] = {}
        for plan in plans:
            ends = tuple(stage.end for stage in plan.stages)
            if (key := (ends, plan.replicas)) not in found:
                found[key] = self._in_order(one, plan, ends)
        kept = [x for x in found.values() if x is not None and StagedPlan(one, x).sayable]
        return sorted(kept, key=lambda plan: plan.seconds)

    def _in_order(
        self, one: Combination, plan: UnequalPlan, ends: Sequence[int]
    ) -> UnequalPlan | None:
        stages = placed(ends, plan.replicas, [APPEND] * len(ends), one.topology)
        if stages == plan.stages:
            return plan
        profile, policies = one.layers.profile, self.policies(len(ends))
        return evaluate(profile, stages, one.topology, one.batch, policies)
