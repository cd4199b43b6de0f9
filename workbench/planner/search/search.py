"""The search: every legal plan of a space evaluated, the best kept, and the reason where none is left."""

from __future__ import annotations

import time as clock
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.plan.errors import PlanError, Problem, refuse
from workbench.plan.schema import Plan, Tensor
from workbench.planner.calibrated import on_machine
from workbench.planner.cost import watts_per_card
from workbench.planner.search import show
from workbench.planner.search.best import Best, Found
from workbench.planner.search.cells import Cell, cells
from workbench.planner.search.constraint import RESULTS, Constraint, narrowed, parse, searched, sensible, words
from workbench.planner.search.evaluate import Evaluated, Evaluator
from workbench.planner.search.space import KINDS, Space, on_cards, plan_of, space_of
from workbench.planner.setting import Number
from workbench.planner.step import step_time
from workbench.planner.timeline import simulated_seconds, timeline
from workbench.planner.workload import workload

OBJECTIVES = ("time", "cost", "energy", "gpus")
GIB = 2**30


@dataclass(frozen=True)
class Candidate:
    """One plan that was found."""

    plan: Plan
    seconds: float
    """Of a step, estimated."""
    peak_bytes: float
    """Largest peak of any rank, estimated."""
    score: float
    """What the objective ranks by; less is better."""
    simulated: float | None = None
    """The step by event simulation, of the best few."""

    def to_json(self) -> dict[str, Any]:
        """For machines; the plan as what was changed in it."""
        tokens = self.plan.training.global_batch * self.plan.training.sequence_length
        return {
            "source": "estimated", "seconds": self.seconds, "simulated_seconds": self.simulated,
            "peak_gib": self.peak_bytes / GIB, "score": self.score,
            "tokens_per_second": tokens / self.seconds, "gpus": self.plan.world_size, "strategy": short(self.plan),
            "plan": self.plan.model_dump(exclude_unset=True),
        }  # fmt: skip


@dataclass(frozen=True)
class SearchResult:
    """What a search found. `candidates` are distinct legal plans, all of them evaluated."""

    objective: str
    candidates: int
    feasible: int
    seconds: float
    """That the search took."""
    top: tuple[Candidate, ...]
    pareto: tuple[Candidate, ...]
    """Fastest first: those that no other beats in both step time and peak."""
    empty: str = ""
    """Where nothing is left: why, and what to change."""

    def __repr__(self) -> str:
        return show.as_text(self)

    def _repr_html_(self) -> str:
        """The tables, as a notebook shows them."""
        return show.as_html(self)

    @property
    def rate(self) -> float:
        """Candidates a second."""
        return self.candidates / max(self.seconds, 1e-9)

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "objective": self.objective, "candidates": self.candidates, "feasible": self.feasible,
            "seconds": self.seconds, "rate_per_second": self.rate, "empty": self.empty or None,
            "top": [one.to_json() for one in self.top], "pareto": [one.to_json() for one in self.pareto],
        }  # fmt: skip


def search(
    plan: Plan, objective: str = "time", *, space: str = "default", top: int = 10,
    where: Sequence[str] = (), deadline_days: float | None = None, tokens: float | None = None,
) -> SearchResult:  # fmt: skip
    """The best plans for the model, cards, batch and precision of `plan`; its strategy is what is searched for.

    `objective`: `time` of a step on all cards; `cost` (card-hours a token), `energy`, `gpus` (fewest that fit) try
    fewer cards too. `where`: conditions such as `strategy.tensor.size<=8`. `deadline_days` keeps what trains `tokens`
    in time. Raises `PlanError` for words and numbers that mean nothing, not for a search that finds nothing.
    """
    began = clock.perf_counter()
    _legal(objective, space, top, deadline_days, tokens)
    constraints = [parse(text) for text in where]
    whole = space_of(plan, space, _worlds(plan, objective))
    sensible(whole, constraints)
    if deadline_days is not None and tokens is not None:
        base = whole.base.training
        longest = deadline_days * 86400 * base.global_batch * base.sequence_length / tokens
        constraints.append(Constraint(f"deadline of {deadline_days:g} days", "seconds", "<=", longest))
    seen = _look(whole, constraints, objective, top)
    why = "" if seen.feasible else _why_empty(whole, constraints, seen)
    best, front = (tuple(_candidate(whole, one) for one in some) for some in (seen.best.top, seen.best.front))
    best = tuple(replace(one, simulated=_simulated(one.plan)) for one in best)
    return SearchResult(objective, seen.candidates, seen.feasible, clock.perf_counter() - began, best, front, why)


@dataclass
class _Seen:
    best: Best
    candidates: int = 0
    feasible: int = 0
    least: float = np.inf
    """Smallest peak of any legal plan, bytes."""


def _look(whole: Space, constraints: Sequence[Constraint], objective: str, top: int) -> _Seen:
    space = narrowed(whole, constraints)
    capacity = whole.settings[0].card.memory_gib * GIB
    seen = _Seen(Best(top, capacity))
    conditions = [c for c in constraints if c.field in RESULTS]
    evaluators = _evaluators(whole)
    for cell in cells(space):
        e = evaluators[cell.setting.world](cell, cell.grid())
        fits = e.legal & (e.peak <= capacity)
        for c in conditions:
            fits = fits & c.holds(_result(cell, e, c.field))
        seen.candidates += e.count(e.legal)
        seen.feasible += e.count(fits)
        seen.least = min(seen.least, float(np.where(e.legal, e.peak, np.inf).min()))
        seen.best.take(cell, e, fits, _score(cell, e, objective))
    return seen


def _evaluators(space: Space) -> dict[int, Evaluator]:
    """By number of cards; a measured machine is slower the more of its ranks work at once, other cards are not."""
    base = space.base
    if base.cluster.calibration is None:
        return dict.fromkeys((s.world for s in space.settings), Evaluator.of(space))
    alone = (replace(space, base=on_cards(base, s), settings=(s,)) for s in space.settings)
    return {one.settings[0].world: Evaluator.of(one) for one in alone}


def _result(cell: Cell, e: Evaluated, field: str) -> Number:
    if field == "peak_gib":
        return e.peak / GIB
    tokens = cell.setting.global_batch * cell.setting.sequence_length
    return e.seconds if field == "seconds" else tokens / e.seconds


def _score(cell: Cell, e: Evaluated, objective: str) -> Number:
    s = cell.setting
    if objective == "time":
        return e.seconds
    if objective == "gpus":
        return s.world + e.seconds / (1e9 + e.seconds)
    if objective == "cost":
        return e.seconds * s.world
    idle, busy = (float(watts_per_card(s.card, share) or 1.0) for share in (0.0, 1.0))
    return s.world * (idle * e.seconds + (busy - idle) * np.minimum(e.compute, e.seconds))


def _candidate(space: Space, found: Found) -> Candidate:
    return Candidate(plan_of(space, found.cell.choice(found.number)), found.seconds, found.peak, found.score)


def _simulated(plan: Plan) -> float | None:
    """The step of a plan by event simulation, where there is a pipeline to simulate."""
    if plan.strategy.pipeline.size == 1:
        return None
    full, k = on_machine(plan.complete())
    w = workload(full)
    time = step_time(w, k)
    return simulated_seconds(w, time, *timeline(w, time.durations))


def _worlds(plan: Plan, objective: str) -> tuple[int, ...]:
    """All cards where only time counts; else halves of them too."""
    worlds = [plan.cluster.gpus]
    while objective != "time" and plan.cluster.nodes is None and worlds[-1] % 2 == 0:
        worlds.append(worlds[-1] // 2)
    return tuple(worlds)


def _why_empty(whole: Space, constraints: Sequence[Constraint], seen: _Seen) -> str:
    """Which condition emptied the search, and what would be found without it."""
    if constraints:
        for number, c in enumerate(constraints):
            others = [*constraints[:number], *constraints[number + 1 :]]
            if (left := _look(whole, others, "time", 1)).feasible:
                best = left.best.top[0]
                fastest = f"the fastest takes {best.seconds:.3g} s a step and {best.peak / GIB:.1f} GiB (estimated)"
                of = ", ".join(words(searched(whole, c)))
                values = f" (searched: {of})" if of else ""
                return f"no plan meets '{c.text}'{values}; without it {left.feasible:,} do, {fastest}"
        if len(constraints) > 1 and (left := _look(whole, (), "time", 1)).feasible:
            told = ", ".join(f"'{c.text}'" for c in constraints)
            return f"no plan meets {told} together; without them {left.feasible:,} do"
    card, s = whole.settings[0].card, whole.settings[0]
    if not seen.candidates:
        return (
            f"no combination of axes divides {s.world} cards and a batch of {s.global_batch} sequences; change "
            "cluster.gpus or training.global_batch"
        )
    return (
        f"no plan fits {card.name} of {card.memory_gib:.1f} GiB: the smallest of {seen.candidates:,} peaks at "
        f"{seen.least / GIB:.1f} GiB (estimated); change cluster.gpu, cluster.gpus, the sequence length or the model"
    )


def _legal(objective: str, space: str, top: int, deadline: float | None, tokens: float | None) -> None:
    for option, value, known in (("--objective", objective, OBJECTIVES), ("--space", space, KINDS)):
        if value not in known:
            raise refuse(option, f"is '{value}'; legal: {', '.join(known)}")
    if not 1 <= top <= 1000:
        raise refuse("--top", f"is {top}; legal: 1 to 1000")
    for name, number in (("--deadline", deadline), ("--tokens", tokens)):
        if number is not None and not 0 < number < float("inf"):
            raise refuse(name, f"is {number}; legal: a number above 0")
    if deadline is not None and tokens is None:
        raise PlanError([Problem("--deadline", "needs --tokens: how many are to be trained by then")])


def short(plan: Plan) -> str:
    """The strategy of a plan with its sizes written out, in a few words, as people write it on a board."""
    s, t, sizes = plan.strategy, plan.training, plan.sizes
    words = [f"{_tensor(s.tensor)}{'s' if s.tensor.sequence else ''}", f"d{sizes['data']}"]
    if sizes["context"] > 1:
        words.insert(1, f"c{sizes['context']}")
    if sizes["pipeline"] > 1:
        chunks = f"x{s.pipeline.chunks}" if s.pipeline.schedule == "interleaved" else ""
        words.append(f"p{sizes['pipeline']} {s.pipeline.schedule}{chunks}")
    if s.expert.size > 1:
        words.append(f"e{s.expert.size}")
    words += [f"micro {t.micro_batch}", f"zero {s.data.zero}"]
    kind = s.recompute
    words.append(f"recompute {kind if isinstance(kind, str) else f'{len(kind)} layers'}")
    if s.data.offload != "none":
        words.append(f"offload {s.data.offload}")
    if s.kernels != "eager":
        words.append(f"{s.kernels} kernels")
    return " · ".join(words)


def _tensor(tensor: Tensor) -> str:
    if isinstance(tensor.size, int):
        return f"t{tensor.size}"
    return f"t{'x'.join(map(str, tensor.size))} {tensor.algorithm}"


__all__ = ["OBJECTIVES", "Candidate", "SearchResult", "search", "short"]
