"""The space that a search goes through: the values of every knob, and the plan that each candidate is."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

from workbench.plan import legal
from workbench.plan.resolve import LEAST_BATCH, MICROBATCHES_A_RANK
from workbench.plan.schema import AXES, Plan
from workbench.plan.shape import Shape
from workbench.planner.calibrated import on_machine
from workbench.planner.setting import Setting, setting_of

KINDS = ("default", "wide", "vast")

PLACEMENTS = {"default": (tuple(AXES),), "wide": tuple(permutations(AXES)), "vast": tuple(permutations(AXES))}
"""Orders of the axes, innermost first; those that differ only in where an axis of one rank stands are one."""
EVERY_SCHEDULE = (
    ("gpipe", 1), ("1f1b", 1), *(("interleaved", chunks) for chunks in (2, 3, 4, 6, 8)),
    ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("dualpipe-v", 2),
)  # fmt: skip
SCHEDULES = {
    "default": (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-v", 2)),
    "wide": EVERY_SCHEDULE,
    "vast": EVERY_SCHEDULE,
}
"""(schedule, chunks a rank)."""
EIGHTHS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
SHARES = {"default": (0.5,), "wide": EIGHTHS, "vast": EIGHTHS}
"""Partial recomputation: the first layers of every stage, as a share of them (Megatron's block method, 2205.05198)."""
MOST_CONTEXT, MOST_MICRO_BATCH = 64, 64
BUCKETS = (12.5, 25.0, 50.0, 100.0, 400.0)
"""Sizes of gradient buckets, MiB."""
LONG = 16384
"""Tokens from which on it is worth splitting the sequence over context ranks."""


@dataclass(frozen=True)
class Space:
    """Values of every knob. Candidates are their combinations that are legal and differ in what they do."""

    base: Plan
    """Complete; what is no knob stays as it is there."""
    settings: tuple[Setting, ...]
    """What all candidates of one number of cards share, but for the knobs of a cell."""
    schedules: tuple[tuple[str, int, int], ...]
    """(schedule, chunks, pipeline ranks)."""
    zero: tuple[int, ...]
    tensor: tuple[int, ...]
    context: tuple[int, ...]
    expert: tuple[int, ...]
    placement: tuple[tuple[str, ...], ...]
    micro_batch: tuple[int, ...]
    recompute: tuple[str | float, ...]
    """A kind, or the share of every stage that is recomputed in full."""
    sequence: tuple[bool, ...]
    shard: tuple[int | str, ...]
    """`all`, or the ranks of a shard group."""
    offload: tuple[str, ...]
    reduce: tuple[str, ...]
    keep_gathered: tuple[bool, ...]
    overlap: tuple[bool, ...]
    bucket_mib: tuple[float, ...]
    gradient: tuple[str, ...]
    """Dtypes of gradients."""


def space_of(plan: Plan, kind: str = "default", worlds: tuple[int, ...] = ()) -> Space:
    """The space around a plan: its model, cards, batch and precision stay, its strategy is free.

    `worlds`: numbers of cards to try; default the plan's own.
    """
    worlds = worlds or (plan.cluster.gpus,)
    bases = {world: _neutral(plan, world) for world in worlds}
    measured = [on_machine(base)[0] for base in bases.values()]
    base, batch = bases[max(worlds)], _batch(plan, max(worlds))
    shape, most, wide = base.shape, max(worlds), kind != "default"
    sequence, node = base.training.sequence_length, int(base.cluster.gpus_per_node or 1)
    tensor = tuple(t for t in legal.tensor_sizes(shape, most) if wide or t <= node)
    ways = legal.context_sizes(shape, min(most, MOST_CONTEXT), sequence, 1, "ring")
    return Space(
        base=base.replace(**{"training.global_batch": batch}),
        settings=tuple(replace(setting_of(each), global_batch=batch) for each in measured),
        schedules=_schedules(kind, shape, most), zero=(0, 1, 2, 3), tensor=tensor,
        context=tuple(ways) if sequence >= LONG else (1,),
        expert=tuple(legal.expert_sizes(shape, most)), placement=PLACEMENTS[kind],
        micro_batch=tuple(b for b in legal.divisors(batch) if b <= MOST_MICRO_BATCH),
        recompute=("none", "selective", "full", *SHARES[kind]), sequence=(False, True),
        shard=("all", node) if wide else ("all",), offload=("none", "optimizer", "parameters"),
        reduce=("step", "microbatch") if wide else ("step",), keep_gathered=(False, True) if wide else (False,),
        overlap=(True, False) if wide else (True,),
        bucket_mib=BUCKETS if kind == "vast" else (plan.strategy.data.bucket_mib,),
        gradient=("fp32", "parameters") if kind == "vast" else (plan.strategy.gradient_dtype,),
    )  # fmt: skip


def _neutral(plan: Plan, world: int) -> Plan:
    """The plan completed with a strategy and a batch that are legal whatever they are: both are knobs."""
    strategy = plan.strategy.model_dump(include={"precision", "kernels", "stack"}, exclude_unset=True)
    changes = {"strategy": strategy, "cluster.gpus": world, "training.micro_batch": 1, "training.global_batch": world}
    return plan.replace(**changes, **({"cluster.nodes": None} if world != plan.cluster.gpus else {})).complete()


def _batch(plan: Plan, world: int) -> int:
    """Sequences a step: as written, or the default for these cards."""
    written = plan.model_dump(exclude_unset=True).get("training", {})
    return int(written.get("global_batch", max(LEAST_BATCH, MICROBATCHES_A_RANK * world)))


def _schedules(kind: str, shape: Shape, ranks: int) -> tuple[tuple[str, int, int], ...]:
    """Every schedule with every pipeline size that it fits; one rank needs no schedule."""
    found = [("1f1b", 1, 1)]
    for schedule, chunks in SCHEDULES[kind]:
        found += [(schedule, chunks, p) for p in legal.pipeline_sizes(shape, ranks, chunks) if p > 1]
    return tuple(found)


def chosen_layers(kind: str | float, partition: tuple[int, ...]) -> tuple[int, ...]:
    """Layers that are recomputed in full: all, none, or the first share of every stage."""
    if isinstance(kind, str):
        return tuple(range(sum(partition))) if kind == "full" else ()
    starts = (sum(partition[:stage]) for stage in range(len(partition)))
    return tuple(
        start + layer for start, count in zip(starts, partition) for layer in range(math.ceil(kind * count - 1e-9))
    )


def plan_of(space: Space, choice: dict[str, Any]) -> Plan:
    """The plan that a candidate is: the base with every knob written out."""
    kind = choice["recompute"]
    recompute = kind if isinstance(kind, str) else list(chosen_layers(kind, choice["partition"]))
    return space.base.replace(
        **{
            "name": "",
            "cluster.gpus": choice["world"],
            "cluster.nodes": None,
            "cluster.gpus_per_node": choice["node"],
            "training.micro_batch": choice["micro_batch"],
            "strategy.preset": None,
            "strategy.tensor.algorithm": "1d",
            "strategy.context.algorithm": "ring",
            "strategy.tensor.size": choice["tensor"],
            "strategy.tensor.sequence": choice["sequence"],
            "strategy.context.size": choice["context"],
            "strategy.expert.size": choice["expert"],
            "strategy.pipeline.size": choice["pipeline"],
            "strategy.pipeline.schedule": choice["schedule"],
            "strategy.pipeline.chunks": choice["chunks"],
            "strategy.pipeline.partition": "balanced",
            "strategy.placement": list(choice["placement"]),
            "strategy.recompute": recompute,
            "strategy.data.zero": choice["zero"],
            "strategy.data.shard": choice["shard"],
            "strategy.data.offload": choice["offload"],
            "strategy.data.reduce": choice["reduce"],
            "strategy.data.keep_gathered": choice["keep_gathered"],
            "strategy.data.overlap": choice["overlap"],
            "strategy.data.bucket_mib": choice["bucket_mib"],
            "strategy.gradient_dtype": choice["gradient"],
        }
    )
