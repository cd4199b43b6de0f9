"""Neighbours: every legal plan that differs in one knob by one step, and what the step gains or
loses.

Kernels are no such knob: they are installed, not chosen, and a search leaves them as written unless
it is told to vary them; `sensitivity` says what others would change.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.axis_rules import CHUNKS, SCHEDULES
from workbench.planner.axis_placement import placements
from workbench.planner.explain.plan_figures import Change, Effect, Subject

Move = tuple[str, Change]
"""What the step is called, and the fields that it sets."""


def neighbours(subject: Subject) -> list[Effect]:
    """Every legal step that can be estimated: those that fit first, the fastest first."""
    found = [effect for name, change in moves(subject) if (effect := subject.effect(name, change))]
    return sorted(
        found, key=lambda effect: (not effect.after.fits, -effect.speed, effect.after.peak_bytes)
    )


def moves(subject: Subject) -> Iterator[Move]:
    """All one-step moves of one knob, legal or not."""
    full = subject.full
    yield from _axes(subject)
    if full.strategy.pipeline.size > 1:
        yield from _schedules(subject)
    yield from _twice_and_half("micro-batch", "training.micro_batch", full.training.micro_batch)
    yield from _data(full)
    yield from _placement(full)
    yield from _words(
        "recompute", "strategy.recompute", full.strategy.recompute, ("none", "selective", "full")
    )


def _axes(subject: Subject) -> Iterator[Move]:
    s = subject.full.strategy
    if isinstance(s.tensor.size, int):
        yield from _twice_and_half("tensor", "strategy.tensor.size", s.tensor.size)
    if s.tensor.ranks > 1 and s.tensor.algorithm == "1d":
        yield _switch("sequence parallel", "strategy.tensor.sequence", s.tensor.sequence)
    for name, change in _twice_and_half("pipeline", "strategy.pipeline.size", s.pipeline.size):
        yield name, change | _repartitioned(subject)
    yield from _twice_and_half("context", "strategy.context.size", s.context.size)
    if subject.full.shape.moe:
        yield from _twice_and_half("expert", "strategy.expert.size", s.expert.size)


def _schedules(subject: Subject) -> Iterator[Move]:
    p = subject.full.strategy.pipeline
    if p.schedule == "interleaved":
        for name, change in _twice_and_half("chunks", "strategy.pipeline.chunks", p.chunks):
            yield name, change | _repartitioned(subject)
    for schedule in SCHEDULES:
        if schedule != p.schedule:
            chunks = CHUNKS[schedule][0] if schedule in CHUNKS else max(2, p.chunks)
            fields: Change = {
                "strategy.pipeline.schedule": schedule,
                "strategy.pipeline.chunks": chunks,
            }
            fields |= _repartitioned(subject) if chunks != p.chunks else {}
            yield f"schedule {p.schedule} → {schedule}", fields


def _data(full: ResolvedPlan) -> Iterator[Move]:
    d = full.strategy.data
    for zero in (d.zero - 1, d.zero + 1):
        if 0 <= zero <= 3:
            yield f"ZeRO {d.zero} → {zero}", {"strategy.data.zero": zero}
    yield from _words(
        "offload", "strategy.data.offload", d.offload, ("none", "optimizer", "parameters")
    )
    if full.sizes["data"] > 1:
        yield _switch("overlap", "strategy.data.overlap", d.overlap)


def _placement(full: ResolvedPlan) -> Iterator[Move]:
    """The fastest order of the axes, where it is not the plan's own."""
    best = list(placements(full)[0].order)
    if best != full.strategy.placement:
        yield f"placement → {', '.join(best)}", {"strategy.placement": best}


def _repartitioned(subject: Subject) -> Change:
    """A list of layers a stage does not outlive the number of stages."""
    fixed = isinstance(subject.plan.strategy.pipeline.partition, list)
    return {"strategy.pipeline.partition": "balanced"} if fixed else {}


def _twice_and_half(name: str, field: str, now: int) -> Iterator[Move]:
    yield f"{name} {now} → {2 * now}", {field: 2 * now}
    if now % 2 == 0:
        yield f"{name} {now} → {now // 2}", {field: now // 2}


def _words(name: str, field: str, now: object, choices: tuple[str, ...]) -> Iterator[Move]:
    told = now if isinstance(now, str) else "some layers"
    yield from (
        (f"{name} {told} → {choice}", {field: choice}) for choice in choices if choice != now
    )


def _switch(name: str, field: str, now: bool) -> Move:
    return f"{name} {'on → off' if now else 'off → on'}", {field: not now}
