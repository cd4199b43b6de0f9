"""Neighbours: every legal plan that differs in one knob by one step, and what the step gains or
loses.

Kernels are no such knob: they are installed, not chosen, and a search leaves them as written unless
it is asked to vary them; `sensitivity` says what others would change.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.axis_placement import rank_placements
from workbench.planner.explain.plan_figures import ChangeEffect, ExplainedPlan
from workbench.planner.plan_changes import OFFLOAD_KINDS, RECOMPUTE_KINDS, Change
from workbench.schedules.generators import SCHEDULES

NamedChange = tuple[str, Change]
"""What the step is called, and the fields that it sets."""


def neighbor_plans(subject: ExplainedPlan) -> list[ChangeEffect]:
    """Every legal step that can be estimated: those that fit first, the fastest first."""
    found = [
        effect
        for name, change in one_step_changes(subject)
        if (effect := subject.effect(name, change))
    ]
    return sorted(
        found, key=lambda effect: (not effect.after.fits, -effect.speed, effect.after.peak_bytes)
    )


def one_step_changes(subject: ExplainedPlan) -> Iterator[NamedChange]:
    """All one-step moves of one knob, legal or not."""
    full = subject.resolved
    yield from _axis_changes(subject)
    if full.strategy.pipeline.size > 1:
        yield from _schedule_changes(subject)
    yield from _double_and_halve("micro-batch", "training.micro_batch", full.training.micro_batch)
    yield from _data_changes(full)
    yield from _placement_change(full)
    yield from _choice_changes(
        "recompute", "strategy.recompute", full.strategy.recompute, RECOMPUTE_KINDS
    )


def _axis_changes(subject: ExplainedPlan) -> Iterator[NamedChange]:
    s = subject.resolved.strategy
    if isinstance(s.tensor.size, int):
        yield from _double_and_halve("tensor", "strategy.tensor.size", s.tensor.size)
    if s.tensor.ranks > 1 and s.tensor.algorithm == "1d":
        yield _toggle("sequence parallel", "strategy.tensor.sequence", s.tensor.sequence)
    for name, change in _double_and_halve("pipeline", "strategy.pipeline.size", s.pipeline.size):
        yield name, change | _repartitioned(subject)
    yield from _double_and_halve("context", "strategy.context.size", s.context.size)
    if subject.resolved.shape.moe:
        yield from _double_and_halve("expert", "strategy.expert.size", s.expert.size)


def _schedule_changes(subject: ExplainedPlan) -> Iterator[NamedChange]:
    p = subject.resolved.strategy.pipeline
    if p.schedule == "interleaved":
        for name, change in _double_and_halve("chunks", "strategy.pipeline.chunks", p.chunks):
            yield name, change | _repartitioned(subject)
    for schedule, definition in SCHEDULES.items():
        if schedule != p.schedule:
            low, most = definition.min_chunks, definition.max_chunks
            chunks = max(low, p.chunks) if most is None else low
            fields: Change = {
                "strategy.pipeline.schedule": schedule,
                "strategy.pipeline.chunks": chunks,
            }
            fields |= _repartitioned(subject) if chunks != p.chunks else {}
            yield f"schedule {p.schedule} → {schedule}", fields


def _data_changes(full: ResolvedPlan) -> Iterator[NamedChange]:
    d = full.strategy.data
    for zero in (d.zero - 1, d.zero + 1):
        if 0 <= zero <= 3:
            yield f"ZeRO {d.zero} → {zero}", {"strategy.data.zero": zero}
    yield from _choice_changes("offload", "strategy.data.offload", d.offload, OFFLOAD_KINDS)
    if full.sizes["data"] > 1:
        yield _toggle("overlap", "strategy.data.overlap", d.overlap)


def _placement_change(full: ResolvedPlan) -> Iterator[NamedChange]:
    """The fastest order of the axes, where it is not the plan's own."""
    best = list(rank_placements(full)[0].order)
    if best != full.strategy.placement:
        yield f"placement → {', '.join(best)}", {"strategy.placement": best}


def _repartitioned(subject: ExplainedPlan) -> Change:
    """A list of layers a stage does not outlive the number of stages."""
    fixed = isinstance(subject.plan.strategy.pipeline.partition, list)
    return {"strategy.pipeline.partition": "balanced"} if fixed else {}


def _double_and_halve(name: str, field: str, now: int) -> Iterator[NamedChange]:
    yield f"{name} {now} → {2 * now}", {field: 2 * now}
    if now % 2 == 0:
        yield f"{name} {now} → {now // 2}", {field: now // 2}


def _choice_changes(
    name: str, field: str, now: object, choices: tuple[str, ...]
) -> Iterator[NamedChange]:
    current = now if isinstance(now, str) else "some layers"
    yield from (
        (f"{name} {current} → {choice}", {field: choice}) for choice in choices if choice != now
    )


def _toggle(name: str, field: str, now: bool) -> NamedChange:
    return f"{name} {'on → off' if now else 'off → on'}", {field: not now}
