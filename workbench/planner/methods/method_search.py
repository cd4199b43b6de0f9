"""The cheapest way to fine-tune: the best plans of every method, from one GPU to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from workbench.errors import PlanError, refuse
from workbench.plan.schema import Plan
from workbench.planner.methods.finetune_methods import METHODS, method_plan, method_words
from workbench.planner.methods.method_comparison import MethodComparison, MethodPlans
from workbench.planner.methods.method_states import state_bytes
from workbench.planner.plan_conditions import Condition
from workbench.planner.search.constraints import check_bounds, parse_constraint
from workbench.planner.search.results.candidate_figures import CandidateFigures
from workbench.planner.search.results.empty_search import deadline_constraint
from workbench.planner.search.results.search_result import Candidate
from workbench.planner.search.search import DIVIDED, check_options, gpu_counts, search
from workbench.planner.search.search_space import (
    SPACES,
    SearchSpace,
    neutral_plan,
    search_space,
    wanted_global_batch,
)
from workbench.planner.search.space_scan import scan_space

Progress = Callable[[str], None]


def search_methods(
    plan: Plan,
    *,
    space: str | None = None,
    where: Sequence[str] = (),
    deadline_days: float | None = None,
    tokens: float | None = None,
    risk: float = SearchSpace.risk,
    progress: Progress = lambda words: None,
) -> MethodComparison:
    """The fastest plan of every method to fine-tune, on the GPUs of `plan`, half of them, and so
    on.

    Args:
        plan: Its model, GPUs, batch, adapters and 4-bit format count; its strategy does not.
        space: default, wide or vast, as `search` has them.
        where: Conditions on every plan.
        deadline_days: Days within which the tokens must be trained.
        tokens: Tokens to train on; default those of the plan's steps.
        risk: Largest probability of running out of memory.
        progress: Called with what is searched.

    Raises:
        PlanError: The plan does not fine-tune, an option means nothing, or no method is legal.
    """
    batch = wanted_global_batch(plan, plan.cluster.gpus)
    every = {
        name: method_plan(plan, name).replace(**{"finetune.global_batch": batch})
        for name in METHODS
    }
    if space in DIVIDED:
        legal = ", ".join(name for name in SPACES if name not in DIVIDED)
        raise refuse("--space", f"is '{space}', in which methods are not compared; legal: {legal}")
    first = search_space(every[METHODS[0]], worlds=(plan.cluster.gpus,)).base
    steps, length = first.training.steps, first.training.sequence_length
    asked = float(steps * batch * length) if tokens is None else tokens
    check_options("time", space, 1, deadline_days, asked, risk)
    look = _Look(space or "default", where, deadline_days, asked, risk, progress)
    results, refused = [], []
    for name, alone in every.items():
        try:
            results.append(look.through(name, alone))
        except PlanError as error:
            refused.append(error)
            results.append(MethodPlans(name, method_words(alone), (), error.first))
    if len(refused) == len(METHODS):
        raise refused[0]
    return MethodComparison(
        first.name, plan.cluster.gpus, first.gpu, length, batch, asked, tuple(results)
    )


@dataclass(frozen=True)
class _Look:
    """A search for one method's plans; fields as the arguments of `search_methods`."""

    space: str
    where: Sequence[str]
    deadline_days: float | None
    tokens: float
    risk: float
    progress: Progress

    def through(self, name: str, plan: Plan) -> MethodPlans:
        """The fastest plan on every number of GPUs that it fits on, fewest first."""
        words, counts = method_words(plan), gpu_counts(plan, "gpus")
        found = []
        for gpus in reversed(counts):
            self.progress(f"{words}, {gpus:,} of {counts[0]:,} GPUs")
            if best := self._fastest(plan, gpus):
                found.append(best)
        why = "" if found else self._why_none(plan)
        alone = plan.replace(**{"cluster.gpus_per_node": None})
        return MethodPlans(name, words, tuple(found), why, state_bytes(neutral_plan(alone, 1)))

    def _fastest(self, plan: Plan, gpus: int) -> Candidate | None:
        space = replace(search_space(plan, self.space, (gpus,)), risk=self.risk)
        conditions: list[Condition] = [parse_constraint(text) for text in self.where]
        check_bounds(space, conditions)
        if self.deadline_days is not None:
            conditions.append(deadline_constraint(space, self.deadline_days, self.tokens))
        seen = scan_space(space, conditions, "time", 1)
        return CandidateFigures(space).of(seen.best.top[0]) if seen.feasible else None

    def _why_none(self, plan: Plan) -> str:
        return search(
            plan,
            "gpus",
            space=self.space,
            top=1,
            where=self.where,
            deadline_days=self.deadline_days,
            tokens=self.tokens,
            risk=self.risk,
        ).empty
