"""What to change so that a plan fits: the smallest change, tried in the order in which people would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workbench.plan import catalog
from workbench.plan.errors import PlanError
from workbench.plan.schema import Card, Plan
from workbench.plan.support import unsupported
from workbench.planner.calibrated import on_machine
from workbench.planner.memory import memory
from workbench.planner.workload import workload

Change = dict[str, Any]
"""Field -> value, as `Plan.replace` takes it."""

RECOMPUTE = ("none", "selective", "full")
DOUBLINGS = 6
PRESETS = ("zero-3", "megatron-3d", "zero-infinity")
"""Whole strategies that are tried before larger cards, as they are and then recomputing all."""


def peak_bytes(full: Plan) -> int:
    """Largest peak over the ranks of a complete plan."""
    here, constants = on_machine(full)
    return round(float(memory(workload(here), constants).peak.max()))


def advise(plan: Plan, full: Plan) -> dict[str, Any] | None:
    """The first change that makes the plan fit: {field, from, to, peak_bytes, changes}; None where none is found.

    `full` is `plan` completed; `changes` is what `plan.replace` takes. One field where one is enough, else a strategy
    with more cards. A plan that can run is first offered what can run too.
    """
    runs = not unsupported(full, "run")
    candidates = [*one_field(full)]
    for must_run in (True, False) if runs else (False,):
        for change in candidates:
            if found := _fitting(plan, full, change, must_run):
                return found
    tried = (_fitting(plan, full, change, False) for change in several_fields(full))
    return next((found for found in tried if found), None)


def _fitting(plan: Plan, full: Plan, change: Change, must_run: bool) -> dict[str, Any] | None:
    try:
        changed = plan.replace(**change).complete()
        if must_run and unsupported(changed, "run"):
            return None
        peak = peak_bytes(changed)
    except PlanError:
        return None
    if peak > changed.card.memory_gib * 2**30:
        return None
    before = [_now(full, field) for field in change]
    one = len(change) == 1
    return {
        "field": " and ".join(change),
        "from": before[0] if one else ", ".join(map(str, before)),
        "to": next(iter(change.values())) if one else ", ".join(map(str, change.values())),
        "peak_bytes": peak,
        "changes": change,
    }


def _now(full: Plan, field: str) -> Any:
    """What the field says now, in a word."""
    value: Any = full
    for name in field.split("."):
        value = getattr(value, name)
    return value.name if isinstance(value, Card) else value


def one_field(full: Plan) -> Iterator[Change]:
    """Changes of one field: microbatch, recomputing, sharding, splitting, more cards, a preset, a larger card."""
    s = full.strategy
    size = full.training.micro_batch
    while size > 1:
        size //= 2
        yield {"training.micro_batch": size}
    if isinstance(s.recompute, str):
        yield from ({"strategy.recompute": kind} for kind in RECOMPUTE[RECOMPUTE.index(s.recompute) + 1 :])
    yield from ({"strategy.data.zero": zero} for zero in range(s.data.zero + 1, 4))
    for field, now in (("strategy.tensor.size", s.tensor.ranks), ("strategy.pipeline.size", s.pipeline.size)):
        yield from ({field: now * 2**n} for n in range(1, DOUBLINGS + 1) if now * 2**n <= full.world_size)
    yield from ({"cluster.gpus": full.world_size * 2**n} for n in range(1, DOUBLINGS + 1))
    yield from ({"strategy.preset": name} for name in PRESETS if name != s.preset)
    yield from ({"cluster.gpu": card.name} for card in _larger(full.card))


def several_fields(full: Plan) -> Iterator[Change]:
    """A preset that recomputes all, on as many cards as it takes, then on larger cards."""
    cards: list[Change] = [{}, *({"cluster.gpu": card.name} for card in _larger(full.card)[-1:])]
    for card in cards:
        for n in range(2 * DOUBLINGS):
            for name in PRESETS:
                more = {"cluster.gpus": full.world_size * 2**n} if n else {}
                yield {**card, **more, "strategy.preset": name, "strategy.recompute": "full"}


def _larger(card: Card) -> list[Card]:
    """Cards of the catalog with more memory, smallest first; of the same kind, or any where the card is a CPU."""
    others = [entry.card for entry in catalog.gpus().values()]
    kind = "cuda" if card.device == "cpu" else card.device
    larger = [other for other in others if other.device == kind and other.memory_gib > card.memory_gib]
    return sorted(larger, key=lambda other: other.memory_gib)
