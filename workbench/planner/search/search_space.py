"""The space that a search goes through: the values of every knob, and the plan that each candidate
is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate, permutations
from typing import Any

from workbench.costmodel.frameworks.framework_profile import DEFAULT_FRAMEWORK
from workbench.costmodel.inputs.config import FixedConfig, fixed_config
from workbench.costmodel.memory.reported_memory import largest_peak_at_risk
from workbench.plan.model.four_bit_base import four_bit_format
from workbench.plan.model.model_shape import Shape
from workbench.plan.resolution import LEAST_BATCH, MICROBATCHES_A_RANK
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules import legal_sizes
from workbench.plan.rules.strategy import tile_rules
from workbench.plan.rules.strategy.kernel_rules import OWN_KERNELS
from workbench.plan.rules.task import four_bit_rules
from workbench.plan.schema import AXES, Plan, Strategy
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.plan_changes import TILE_FACTORS
from workbench.planner.plan_conditions import USUAL_RISK
from workbench.schedules.generators import SCHEDULES
from workbench.units import GIB

SPACES = ("default", "wide", "vast", "unequal", "operators")

PLACEMENTS = {
    "default": (tuple(AXES),),
    "wide": tuple(permutations(AXES)),
    "vast": tuple(permutations(AXES)),
}
"""Orders of the axes, innermost first; those that differ only in where an axis of one rank stands
are one.
"""
EVERY_SCHEDULE = tuple(
    (name, chunks)
    for name, schedule in SCHEDULES.items()
    for chunks in ((schedule.min_chunks,) if schedule.max_chunks else (2, 3, 4, 6, 8))
)
SEARCHED_SCHEDULES = {
    "default": (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-v", 2)),
    "wide": EVERY_SCHEDULE,
    "vast": EVERY_SCHEDULE,
}
"""(schedule, chunks a rank)."""
EIGHTHS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
ALGORITHMS = {"default": ("1d",), "wide": ("1d",), "vast": ("1d", "2d", "2.5d", "3d")}
"""Of tensor parallelism."""
RECOMPUTE_SHARES = {"default": (0.5,), "wide": EIGHTHS, "vast": EIGHTHS}
"""Partial recomputation: the first layers of every stage, as a share of them (Megatron's block
method, 2205.05198).
"""
MAX_CONTEXT, MAX_MICRO_BATCH = 64, 64
MAX_WIDENING = 1.1
"""Of a tensor rank that pads, over an even share of a layer: beyond it, ranks mostly multiply
zeros.
"""
BUCKET_SIZES_MIB = (12.5, 25.0, 50.0, 100.0, 400.0)
"""Sizes of gradient buckets, MiB."""
LONG_SEQUENCE = 16384
"""Tokens from which on it is worth splitting the sequence over context ranks."""


@dataclass(frozen=True)
class SearchSpace:
    """Values of every knob. Candidates are their combinations that are legal and differ in what
    they do.
    """

    asked: Plan
    """As it was written; what is no knob stays as it is there."""
    base: ResolvedPlan
    """The same, complete and neutral: its strategy is data parallelism, its batch a sequence a
    rank.
    """
    batch: int
    """Sequences a step of every candidate: few strategies may divide it, and pure data parallelism
    need not.
    """
    fixed_configs: tuple[FixedConfig, ...]
    """What all candidates of one number of GPUs share, but for the knobs of a cell."""
    schedules: tuple[tuple[str, int, int], ...]
    """(schedule, chunks, pipeline ranks)."""
    zero: tuple[int, ...]
    tensor: tuple[int | tuple[int, ...], ...]
    """Ranks, or the grid of a higher-dimensional algorithm."""
    algorithm: tuple[str, ...]
    """Of tensor parallelism."""
    kernels: tuple[str, ...]
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
    reduce_as_offloaded: bool
    """Whether, of both, every microbatch is reduced where gradients are offloaded, and only
    there.
    """
    keep_gathered: tuple[bool, ...]
    tile_factor: tuple[int, ...]
    """Rising; one is tried only of strategies that do not fit with a smaller one."""
    overlap: tuple[bool, ...]
    bucket_mib: tuple[float, ...]
    gradient: tuple[str, ...]
    """Dtypes of gradients."""
    risk: float = USUAL_RISK
    """Largest probability of running out of memory that a candidate may have."""

    @property
    def largest_peak_bytes(self) -> float:
        """Largest predicted peak within the risk."""
        capacity = self.fixed_configs[0].gpu.memory_gib * GIB
        return largest_peak_at_risk(self.risk, capacity, self.base.strategy.stack)


def search_space(plan: Plan, kind: str = "default", worlds: tuple[int, ...] = ()) -> SearchSpace:
    """The space around a plan: its model, GPUs, batch and precision stay, its strategy is free.

    `worlds`: numbers of GPUs to try; default the plan's own.
    """
    if plan.training.optimizer.delayed_update:  # legal beside some strategies only
        plan = plan.replace(**{"training.optimizer.delayed_update": False})
    worlds = worlds or (plan.cluster.gpus,)
    bases = {world: neutral_plan(plan, world) for world in worlds}
    measured = [with_calibration(base)[0] for base in bases.values()]
    base, batch = bases[max(worlds)], wanted_global_batch(plan, max(worlds))
    shape, most, wide = base.shape, max(worlds), kind != "default"
    sequence, node = base.training.sequence_length, int(base.cluster.gpus_per_node or 1)
    tensor = tuple(
        t
        for t in legal_sizes.divisors(most)
        if (wide or t <= node) and _worth_searching(shape, t) and _packs(base, t)
    )
    # No grid may split the answers of pairs, or has adapters.
    only_1d = together(plan) > 1 or plan.lora is not None
    rings = 1 if base.strategy.attention == "math" else min(most, MAX_CONTEXT)
    ways = legal_sizes.context_sizes(shape, rings, sequence, 1, "ring")
    return SearchSpace(
        asked=plan,
        base=base,
        batch=batch,
        fixed_configs=tuple(replace(fixed_config(each), global_batch=batch) for each in measured),
        schedules=_schedules(kind, shape, most),
        zero=(0, 1, 2, 3),
        tensor=(*tensor, *(() if only_1d else _tensor_grids(kind, shape, most))),
        algorithm=("1d",) if only_1d else ALGORITHMS[kind],
        kernels=tuple(OWN_KERNELS) if kind == "vast" else (plan.strategy.kernels,),
        context=tuple(ways) if sequence >= LONG_SEQUENCE else (1,),
        expert=tuple(legal_sizes.expert_sizes(shape, most)),
        placement=PLACEMENTS[kind],
        micro_batch=tuple(
            b
            for b in legal_sizes.divisors(batch)
            if b <= MAX_MICRO_BATCH and b % together(plan) == 0
        ),
        recompute=("none", "selective", "full", *RECOMPUTE_SHARES[kind]),
        sequence=(False, True),
        shard=("all", node) if wide else ("all",),
        offload=("none", "optimizer", "parameters"),
        reduce=("step", "microbatch"),
        reduce_as_offloaded=not wide,
        keep_gathered=(False, True) if wide else (False,),
        tile_factor=tuple(factor for factor in TILE_FACTORS if _may_tile(base, factor)),
        overlap=(True, False) if wide else (True,),
        bucket_mib=BUCKET_SIZES_MIB if kind == "vast" else (plan.strategy.data.bucket_mib,),
        gradient=("fp32", "parameters") if kind == "vast" else (plan.strategy.gradient_dtype,),
    )


def neutral_plan(plan: Plan, world: int) -> ResolvedPlan:
    """The plan completed with a strategy and a batch that are legal whatever they are: both are
    knobs.
    """
    strategy = _kept(plan.strategy)
    changes = {
        "strategy": strategy,
        "cluster.gpus": world,
        "training.micro_batch": together(plan),
        "training.global_batch": world * together(plan),
    }
    return plan.replace(
        **changes, **({"cluster.nodes": None} if world != plan.cluster.gpus else {})
    ).resolve()


def plan_on_gpus(base: Plan, setting: FixedConfig, pipeline: int = 1) -> ResolvedPlan:
    """A neutral plan on the GPUs of `setting`, complete: a calibration's figures depend on their
    number.
    """
    sizes = {
        "cluster.gpus": setting.world_size,
        "cluster.nodes": None,
        "cluster.gpus_per_node": setting.gpus_per_node,
    }
    stages = {"strategy.pipeline.size": pipeline, "strategy.pipeline.partition": "balanced"}
    batch = {"training.global_batch": setting.world_size * together(base)}
    return base.replace(**sizes, **stages, **batch).resolve()


def together(plan: Plan) -> int:
    """Sequences that stand in one micro-batch: the two of a preference pair."""
    return 2 if plan.finetune is not None and plan.finetune.preference is not None else 1


def wanted_global_batch(plan: Plan, world: int) -> int:
    """Sequences a step: as written, or the default for these GPUs."""
    written = plan.model_dump(exclude_unset=True).get(plan.task_section, {})
    return int(written.get("global_batch", max(LEAST_BATCH, MICROBATCHES_A_RANK * world)))


def _worth_searching(shape: Shape, size: int) -> bool:
    """Whether a 1-D tensor size divides the model, or pads it little."""
    little = (
        not legal_sizes.exceeds(shape, size) and legal_sizes.widening(shape, size) <= MAX_WIDENING
    )
    return little or not legal_sizes.splits(shape, size)


def _packs(base: ResolvedPlan, size: int) -> bool:
    """Whether a 1-D tensor size leaves every rank complete groups of a base that is in 4 bits."""
    form = four_bit_format(base)
    return form is None or not any(
        columns % form.group for columns in four_bit_rules.rank_columns(base.shape, size).values()
    )


def _may_tile(base: ResolvedPlan, factor: int) -> bool:
    """Whether ZeRO-3 on no other axis may tile the model's linears so."""
    data = base.strategy.data.model_copy(update={"zero": 3, "tile_factor": factor})
    strategy = base.strategy.model_copy(update={"data": data})
    return not any(tile_rules.problems(base.model_copy(update={"strategy": strategy})))


def _schedules(kind: str, shape: Shape, ranks: int) -> tuple[tuple[str, int, int], ...]:
    """Every schedule with every pipeline size that it fits; one rank needs no schedule."""
    found = [("1f1b", 1, 1)]
    for schedule, chunks in SEARCHED_SCHEDULES[kind]:
        found += [
            (schedule, chunks, p) for p in legal_sizes.pipeline_sizes(shape, ranks, chunks) if p > 1
        ]
    return tuple(found)


def _tensor_grids(kind: str, shape: Shape, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Every grid of some algorithm, but those that are another's: of one rank, or of 2.5-D without
    depth.
    """
    found = [
        grid
        for algorithm in ALGORITHMS[kind][1:]
        for grid in legal_sizes.grids(algorithm, ranks, shape)
    ]
    return tuple(dict.fromkeys(tuple(grid) for grid in found if grid[0] > 1 and grid[2:] != [1]))


def recomputed_layers(kind: str | float, partition: tuple[int, ...]) -> tuple[int, ...]:
    """Layers that are recomputed in full: all, none, or the first share of every stage."""
    if isinstance(kind, str):
        return tuple(range(sum(partition))) if kind == "full" else ()
    return tuple(
        start + layer
        for start, count in zip(accumulate(partition, initial=0), partition)
        for layer in range(math.ceil(kind * count - 1e-9))
    )


def candidate_plan(space: SearchSpace, choice: dict[str, Any]) -> Plan:
    """The plan that a candidate is: as it was asked for, with every knob written out that is not at
    its default.
    """
    kind = choice["recompute"]
    strategy = {
        "tensor": {name: choice[knob] for name, knob in TENSOR_KNOBS.items()},
        "context": {"size": choice["context"]},
        "expert": {"size": choice["expert"]},
        "pipeline": {
            "size": choice["pipeline"],
            "schedule": choice["schedule"],
            "chunks": choice["chunks"],
        },
        "placement": list(choice["placement"]),
        "recompute": kind
        if isinstance(kind, str)
        else list(recomputed_layers(kind, choice["partition"])),
        "data": {name: choice[name] for name in DATA_KNOBS},
        "gradient_dtype": choice["gradient"],
        "kernels": choice["kernels"],
    }
    on = {name: choice[name] for name in ("world_size", "gpus_per_node")}
    return plan_with_strategy(space, strategy, choice["micro_batch"], **on)


def plan_with_strategy(
    space: SearchSpace,
    strategy: dict[str, Any],
    micro_batch: int,
    *,
    world_size: int,
    gpus_per_node: int,
) -> Plan:
    """The plan that was asked for with another strategy, written out where it is not at its
    default.
    """
    asked = space.asked
    kept = _kept(asked.strategy)
    wired = asked.cluster.model_dump(include={"gpu", "fabric", "calibration"}, exclude_unset=True)
    cluster = wired | {"gpus": world_size, "gpus_per_node": gpus_per_node}
    batch = {"training.global_batch": space.batch, "training.micro_batch": micro_batch}
    name = {"name": ""} if asked.name else {}
    return asked.replace(**name, cluster=cluster, strategy=kept | _non_default(strategy), **batch)


TENSOR_KNOBS = {"size": "tensor", "algorithm": "algorithm", "sequence": "sequence"}
"""Fields of `strategy.tensor` -> knob."""
DATA_KNOBS = (
    *("zero", "shard", "offload", "reduce", "keep_gathered", "overlap", "bucket_mib"),
    "tile_factor",
)
"""Knobs that are fields of `strategy.data`."""
KEPT_STRATEGY_FIELDS = {"precision", "stack", "attention"}
"""Fields of a strategy that a search leaves as they are."""


def _kept(asked: Strategy) -> dict[str, Any]:
    """Fields of these that were written, and the loss of a stack whose kernels do not choose it."""
    free = KEPT_STRATEGY_FIELDS | ({"loss"} if asked.stack != DEFAULT_FRAMEWORK else set())
    return asked.model_dump(include=free, exclude_unset=True)


def _non_default(strategy: dict[str, Any]) -> dict[str, Any]:
    """Those fields that are not at their default."""
    usual = Strategy().model_dump()
    result: dict[str, Any] = {}
    for name, value in strategy.items():
        if isinstance(value, dict):
            value = {key: one for key, one in value.items() if one != usual[name][key]}
        if value and value != usual[name]:
            result[name] = value
    return result
