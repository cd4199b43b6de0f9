"""Legality of a plan whose model is a layer profile: what its times and sizes can say."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from workbench.errors import Problem
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Data, Plan

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b")
"""Schedules whose stages run each microbatch's backward at once, as it was measured."""


def not_runnable(plan: ResolvedPlan, verb: str) -> Problem:
    """That a layer profile cannot run or be rehearsed."""
    path = plan.profiled and plan.profiled.layer_profile
    what = f"'{path}' is a layer profile, which has no code to {verb}; legal: to estimate and "
    return Problem("model", what + "search it, or the model that it was measured of")


Needs = tuple[tuple[str, object, tuple[object, ...]], ...]
"""(field, its value, what is legal)."""


def _one_device(plan: Plan) -> Iterator[Problem]:
    """What would change the layers' own times or sizes, which are those that were measured."""
    s, training = plan.strategy, plan.training
    needs: Needs = (
        ("strategy.tensor.size", s.tensor.ranks, (1,)),
        ("strategy.tensor.algorithm", s.tensor.algorithm, ("1d",)),
        ("strategy.tensor.sequence", s.tensor.sequence, (False,)),
        ("strategy.context.size", s.context.size, (1,)),
        ("strategy.expert.size", s.expert.size, (1,)),
        ("strategy.expert.tensor", s.expert.tensor, (None,)),
        ("strategy.operators", s.operators, ({},)),
        ("strategy.data.zero", s.data.zero, (0,)),
        ("strategy.recompute", s.recompute or "none", ("none",)),
        ("strategy.attention", s.attention, ("auto",)),
        ("strategy.loss", s.loss, ("auto",)),
        ("strategy.kernels", s.kernels, ("eager",)),
        ("strategy.stack", s.stack, ("workbench",)),
        ("training.dropout", training.dropout, (0.0,)),
        ("finetune", "set" if plan.finetune else None, (None,)),
    )
    return _refused(needs, ", and a layer profile has the times and sizes that were measured")


def _not_modelled(plan: Plan) -> Iterator[Problem]:
    """What lies between layers, and an estimate on a layer profile has no formula for."""
    data, pipeline = plan.strategy.data, plan.strategy.pipeline
    needs: Needs = (
        ("strategy.pipeline.schedule", pipeline.schedule, SCHEDULES),
        ("strategy.pipeline.distribution", pipeline.distribution, ("split",)),
        ("strategy.data.reduce", data.reduce, ("step",)),
        ("strategy.data.bucket_mib", data.bucket_mib, (Data().bucket_mib,)),
        ("cluster.calibration", plan.cluster.calibration, (None,)),
    )
    return _refused(needs, ", which is not modelled for a layer profile")


def _refused(needs: Needs, why: str) -> Iterator[Problem]:
    for field, value, legal in needs:
        if value not in legal:
            *others, last = ("null" if one is None else str(one) for one in legal)
            names = f"{', '.join(others)} or {last}" if others else last
            yield Problem(field, f"is {value}{why}; legal: {names}")


def _as_measured(plan: ResolvedPlan) -> Iterator[Problem]:
    """What the profile says of its own measurement."""
    profile, path = plan.layer_profile, plan.profiled and plan.profiled.layer_profile
    for field, value, measured in (
        ("training.sequence_length", plan.training.sequence_length, profile.sequence_length),
        ("strategy.precision", plan.strategy.precision, profile.precision),
    ):
        if measured not in (None, value):
            yield Problem(
                field, f"is {value}, and '{path}' was measured with {measured}; legal: {measured}"
            )


def _stages(plan: ResolvedPlan) -> Iterator[Problem]:
    """Embedding and head are layers like others here: no stage holds one beside its layers."""
    counts = plan.strategy.pipeline.partition
    if isinstance(counts, list) and 0 in counts:
        yield Problem(
            "strategy.pipeline.partition",
            f"gives stage {counts.index(0)} of {len(counts)} no layer; legal: a layer or more",
        )


RULES: tuple[Callable[[ResolvedPlan], Iterator[Problem]], ...] = (
    _one_device,
    _not_modelled,
    _as_measured,
    _stages,
)
"""Rules for models that are layer profiles; each takes a complete plan."""
