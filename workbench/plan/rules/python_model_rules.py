"""Legality of a plan whose model is the user's code: what can be said without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from workbench.errors import PlanError, Problem, refuse
from workbench.plan.preset_sizes import RULES as SIZE_RULES
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

WHOLE_BACKWARD = ("gpipe", "1f1b", "eager-1f1b", "interleaved")
"""Schedules whose backward is not split."""
ALLOW = "--allow-code (allow_code=True in a notebook)"


def refuse_rules(strategy: Mapping[str, Any], model: str, presets: str) -> None:
    """Raise `PlanError` where a strategy as plain data leaves a size to the shape of a `model` that
    has none; `presets` are those that leave none.
    """
    found, said = [], f"follows from a model's shape, and {model} has none"
    for axis in ("tensor", "context", "pipeline", "expert"):
        if (size := strategy.get(axis, {}).get("size")) in SIZE_RULES:
            what = (
                f"is '{size}', which {said}; legal: a number, or a preset of data parallelism "
                f"({presets})"
            )
            found.append(Problem(f"strategy.{axis}.size", what))
    if found:
        raise PlanError(found)


def forbidden(plan: Plan) -> list[Problem]:
    """That the plan's model is code which the user has not allowed to run; empty where it is
    none.
    """
    if plan.code is None:
        return []
    what = (
        f"'{plan.code.python}' is code, which runs only where you say so; legal: the option "
        f"{ALLOW}, if you trust it"
    )
    return [Problem("model.python", what)]


def untraced(plan: Plan) -> PlanError:
    """That a verb which traces nothing was asked about a plan whose model is code."""
    assert plan.code is not None
    return refuse(
        "model.python",
        f"'{plan.code.python}' is code, whose operators are known only where it is traced; legal: "
        f"estimate, rehearse and run, with {ALLOW}, and compare the profiles that they return",
    )


def _whole(plan: Plan) -> Iterator[Problem]:
    """What names parts of a model, which code does not name."""
    s, said = (
        plan.strategy,
        "the parts of a model given as Python are known only where it is traced",
    )
    needs = (
        ("strategy.context.size", s.context.size, 1),
        ("strategy.expert.size", s.expert.size, 1),
        ("strategy.tensor.algorithm", s.tensor.algorithm, "1d"),
        ("strategy.tensor.sequence", s.tensor.sequence, False),
        ("strategy.recompute", s.recompute or "none", "none"),
        ("strategy.attention", s.attention, "auto"),
        ("strategy.loss", s.loss, "auto"),
        ("training.dropout", plan.training.dropout, 0.0),
        ("finetune", "set" if plan.finetune else None, None),
    )
    for field, value, legal in needs:
        if value != legal:
            yield Problem(field, f"is {value!r}; {said}; legal: {legal}")
    if s.pipeline.size > 1 and s.pipeline.schedule not in WHOLE_BACKWARD:
        legal_schedules = ", ".join(WHOLE_BACKWARD)
        what = f"is {s.pipeline.schedule!r} for a model given as Python; legal: {legal_schedules}"
        yield Problem("strategy.pipeline.schedule", what)
    if s.pipeline.replicas:
        what = "is set for a model given as Python; legal: without it"
        yield Problem("strategy.pipeline.replicas", what)


def _operators(plan: Plan) -> Iterator[Problem]:
    size, operators = plan.strategy.tensor.ranks, plan.strategy.operators
    if size > 1 and not operators:
        yield Problem(
            "strategy.tensor.size",
            f"is {size}, and no strategy.operators say what is split; legal: 1, or "
            "operators such as {'encoder.layers.*.linear1': '((1,1),(1,2))'}",
        )


RULES: tuple[Callable[[ResolvedPlan], Iterator[Problem]], ...] = (_whole, _operators)
"""Rules for models that are code; each takes a complete plan."""
