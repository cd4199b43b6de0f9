"""What to change so that a plan fits: the smallest change, tried in the order in which people
would.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workbench.costmodel.inputs.rank_workload import workload
from workbench.costmodel.memory.peak_memory import peak_memory
from workbench.errors import PlanError
from workbench.machine import gpu_catalog
from workbench.machine.hardware import GPU
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import Plan
from workbench.planner.calibrated_plan import on_machine

Change = dict[str, Any]
"""Field -> value, as `Plan.replace` takes it."""

RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "optimizer", "parameters")
DOUBLINGS = 6
PRESETS = ("zero-3", "megatron-3d", "zero-infinity")
"""Whole strategies that are tried before more GPUs, as they are and then recomputing all."""


def peak_bytes(full: ResolvedPlan) -> int:
    """Largest peak over the ranks of a complete plan."""
    here, constants = on_machine(full)
    return round(float(peak_memory(workload(here), constants).peak.max()))


def advise(plan: Plan, full: ResolvedPlan) -> dict[str, Any] | None:
    """The first change that makes the plan fit: {field, from, to, peak_bytes, changes}; None where
    none is found.

    `full` is `plan` completed; `changes` is what `plan.replace` takes. First what can be done on
    the same GPUs, one field before several, then more of them, then other GPUs, the same vendor's
    before others'. Of each of these a plan that can run is first offered what can run too.
    """
    runs = not unsupported(full, "run")
    tiers = [[*one_field_here(full), *together_here(full)], more_gpus(full), other_gpus(full)]
    for candidates in tiers:
        for must_run in (True, False) if runs else (False,):
            for change in candidates:
                if found := _fitting(plan, full, change, must_run):
                    return found
    return None


def _fitting(plan: Plan, full: Plan, change: Change, must_run: bool) -> dict[str, Any] | None:
    try:
        changed = plan.replace(**change).resolve()
        if must_run and unsupported(changed, "run"):
            return None
        peak = peak_bytes(changed)
    except PlanError:
        return None
    if peak > changed.gpu.memory_gib * 2**30:
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
    return value.name if isinstance(value, GPU) else value


def one_field_here(full: Plan) -> list[Change]:
    """Changes of one field on the same GPUs: micro-batch, recomputing, sharding, offloading,
    splitting, a preset.
    """
    s = full.strategy
    found: list[Change] = [
        {"training.micro_batch": size} for size in _halves(full.training.micro_batch)
    ]
    if isinstance(s.recompute, str):
        found += (
            {"strategy.recompute": kind} for kind in RECOMPUTE[RECOMPUTE.index(s.recompute) + 1 :]
        )
    found += ({"strategy.data.zero": zero} for zero in range(s.data.zero + 1, 4))
    found += (
        {"strategy.data.offload": kind} for kind in OFFLOAD[OFFLOAD.index(s.data.offload) + 1 :]
    )
    for field, now in (
        ("strategy.tensor.size", s.tensor.ranks),
        ("strategy.pipeline.size", s.pipeline.size),
    ):
        found += (
            {field: now * 2**n} for n in range(1, DOUBLINGS + 1) if now * 2**n <= full.world_size
        )
    return found + [{"strategy.preset": name} for name in PRESETS if name != s.preset]


def together_here(full: Plan) -> Iterator[Change]:
    """Changes of several fields on the same GPUs, each step keeping the one before; then presets
    that recompute all.
    """
    s, change = full.strategy, Change()
    if full.training.micro_batch > 1:
        change["training.micro_batch"] = 1
    if isinstance(s.recompute, str) and s.recompute != "full":
        change["strategy.recompute"] = "full"
        yield dict(change)
    for zero in range(s.data.zero, 4):
        change |= {"strategy.data.zero": zero} if zero != s.data.zero else {}
        yield dict(change)
        for kind in OFFLOAD[OFFLOAD.index(s.data.offload) + 1 :]:
            yield change | {"strategy.data.offload": kind}
    yield from _presets(full)


def more_gpus(full: Plan) -> list[Change]:
    """The same plan on more GPUs, then presets that recompute all."""
    more = [{"cluster.gpus": full.world_size * 2**n} for n in range(1, 2 * DOUBLINGS)]
    return [*more[:DOUBLINGS], *(gpus | preset for gpus in more for preset in _presets(full))]


def other_gpus(full: ResolvedPlan) -> list[Change]:
    """The same plan on a larger GPU, then presets that recompute all on as many of the largest as
    it takes.
    """
    larger: list[Change] = [{"cluster.gpu": card.name} for card in _larger(full.gpu)]
    more: list[Change] = [
        {},
        *({"cluster.gpus": full.world_size * 2**n} for n in range(1, 2 * DOUBLINGS)),
    ]
    return [
        *larger,
        *(larger[-1] | gpus | preset for gpus in more for preset in _presets(full) if larger),
    ]


def _presets(full: Plan) -> list[Change]:
    """Whole strategies that save the most, recomputing all."""
    return [{"strategy.preset": name, "strategy.recompute": "full"} for name in PRESETS]


def _halves(size: int) -> Iterator[int]:
    while size > 1:
        size //= 2
        yield size


def _larger(card: GPU) -> list[GPU]:
    """GPUs of the catalog with more memory (any, where the card is a CPU): the same vendor's first,
    smallest first.
    """
    others = [entry.gpu for entry in gpu_catalog.gpus().values()]
    kind = "cuda" if card.device == "cpu" else card.device
    larger = [
        other for other in others if other.device == kind and other.memory_gib > card.memory_gib
    ]
    return sorted(larger, key=lambda other: (_vendor(other) != _vendor(card), other.memory_gib))


def _vendor(card: GPU) -> str:
    """The first word of a card's title, as the catalog writes it."""
    return card.title.partition(" ")[0].lower()
