"""What a search for ways to fine-tune found: plans of every method, and what each saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from workbench.machine.hardware import GPU
from workbench.planner.methods import method_tables
from workbench.planner.methods.finetune_methods import FULL
from workbench.planner.methods.method_states import StateBytes
from workbench.planner.search.results.search_result import Candidate
from workbench.planner.search.results.strategy_summary import strategy_summary
from workbench.planner.training_cost import HOUR
from workbench.units import GIB

GOALS: dict[str, Callable[[Candidate], float]] = {
    "fewest GPUs": lambda one: one.plan.world_size,
    "lowest cost": lambda one: one.plan.world_size * one.expected_seconds,
    "shortest": lambda one: one.expected_seconds,
}
"""Goal -> what is least of the plans of a method."""


class MethodPlans(NamedTuple):
    """What was found of one method."""

    method: str
    """One of `METHODS`."""
    words: str
    """It with its settings, for people."""
    by_gpus: tuple[Candidate, ...]
    """The fastest plan on each number of GPUs that some plan fits on, fewest first."""
    empty: str
    """Where there is none: why."""
    states: StateBytes | None = None
    """Of one copy of the model; None of a method that the plan cannot have."""

    def best(self, goal: str) -> Candidate | None:
        """The plan of a goal; of equal ones that on the fewest GPUs."""
        return min(self.by_gpus, key=GOALS[goal], default=None)


class Bill(NamedTuple):
    """What training the asked tokens by a plan takes. Estimated."""

    gpus: int
    hours: float
    gpu_hours: float
    dollars: float | None


@dataclass(frozen=True, repr=False)
class MethodComparison:
    """The methods of fine-tuning beside each other. Every figure is estimated."""

    name: str
    """Of the plan."""
    gpus: int
    """At most."""
    gpu: GPU
    sequence_length: int
    global_batch: int
    """Sequences a step of every plan."""
    tokens: float
    """Tokens to train on."""
    methods: tuple[MethodPlans, ...]

    def bill(self, one: Candidate) -> Bill:
        """What the tokens take by a plan, with what a nearly full GPU is expected to slow it."""
        gpus, price = one.plan.world_size, self.gpu.price_per_hour
        hours = one.expected_seconds * self.tokens / one.step_tokens / HOUR
        dollars = None if price is None else hours * gpus * price
        return Bill(gpus, hours, hours * gpus, dollars)

    def saved(self, method: MethodPlans, goal: str) -> dict[str, float] | None:
        """Share of each figure of `Bill` that a method saves of full fine-tuning for the same goal;
        below 0 where it takes more. None where either has no plan.
        """
        full, own = self.full.best(goal), method.best(goal)
        if full is None or own is None:
            return None
        pairs = zip(Bill._fields, self.bill(own), self.bill(full))
        return {name: 1 - less / most for name, less, most in pairs if less is not None and most}

    @property
    def full(self) -> MethodPlans:
        """Full fine-tuning, which the others save of."""
        return next(each for each in self.methods if each.method == FULL)

    @property
    def goals(self) -> tuple[str, ...]:
        """What plans are the best for."""
        return tuple(GOALS)

    @property
    def cheapest(self) -> Candidate | None:
        """The plan of lowest cost of all methods; None where no method has one."""
        found = [best for each in self.methods if (best := each.best("lowest cost"))]
        return min(found, key=GOALS["lowest cost"], default=None)

    def __repr__(self) -> str:
        return method_tables.comparison_text(self)

    def _repr_html_(self) -> str:
        """The tables, as a notebook shows them."""
        return method_tables.as_html(self)

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "source": "estimated",
            "plan": self.name,
            "gpus_at_most": self.gpus,
            "price_per_hour": self.gpu.price_per_hour,
            "sequence_length": self.sequence_length,
            "global_batch": self.global_batch,
            "tokens": self.tokens,
            "methods": [self._method_json(each) for each in self.methods],
        }

    def _method_json(self, each: MethodPlans) -> dict[str, Any]:
        goals = {}
        for goal in GOALS if each.by_gpus else ():
            best = each.best(goal)
            goals[goal] = {"gpus": best and best.plan.world_size, "saved": self.saved(each, goal)}
        plans = [self._plan_json(one) for one in each.by_gpus]
        return {
            "method": each.method,
            "name": each.words,
            "empty": each.empty or None,
            "state_bytes": each.states and each.states._asdict(),
            "by_gpus": plans,
            "goals": goals,
        }

    def _plan_json(self, one: Candidate) -> dict[str, Any]:
        return self.bill(one)._asdict() | {
            "step_seconds": one.seconds,
            "expected_seconds": one.expected_seconds,
            "peak_gib": one.peak_bytes / GIB,
            "probability_of_running_out": one.risk,
            "strategy": strategy_summary(one.plan),
            "plan": one.plan.model_dump(exclude_unset=True),
        }
