"""What is asked of the planner: what all candidates share, and the knobs that differ from one to
the next.

One model serves one plan and millions: every quantity is a float, or an array in which each
candidate has its place. Arrays of one number a pipeline stage have the stages along their first
axis, candidates along the axes behind it; NumPy's broadcasting then computes what depends on few
knobs once, on few elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.costmodel.frameworks.framework_profile import FrameworkProfile, framework_profile
from workbench.machine.hardware import GPU, Fabric
from workbench.plan.custom_schedule import drawn
from workbench.plan.model_shape import Shape
from workbench.plan.optimizer_state import DTYPE_BYTES, master_bytes, moment_bytes, num_moments
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import AXES, Plan
from workbench.schedules import Table

Array = NDArray[np.float64]
Number = Any
"""A float, or an array of one number a candidate."""


@dataclass(frozen=True)
class FixedConfig:
    """What all candidates at hand share."""

    shape: Shape
    gpu: GPU
    fabric: Fabric
    gpus_per_node: int
    """Cards in a node."""
    world_size: int
    global_batch: int
    sequence_length: int
    precision: str
    kernels: str
    stack: str
    framework: FrameworkProfile
    """What that stack keeps."""
    parameter_bytes: float
    """A parameter as it is stored."""
    gradient_bytes: float
    """A gradient as it is stored; negative: as it is reduced."""
    gradient_accumulator_bytes: float
    """A second gradient beside it, whole on every rank."""
    moment_bytes: float
    """Optimizer moments, bytes a parameter."""
    master_bytes: float
    step_element_bytes: float
    """Bytes of an entry as the optimizer's step is made, where our own engine makes it."""
    step_cast_bytes: float
    """What of master, or parameter, and moments is kept in less, and widened for the step: bytes a
    parameter.
    """
    zero: int
    num_zero_in_flight: int
    """Units that ZeRO-3 gathers, and buckets that it or ZeRO-2 reduces, at once."""
    algorithm: str
    """Of tensor parallelism: 1d, 2d, 2.5d, 3d."""
    context_algorithm: str
    has_context_parallel: bool
    """Whether any candidate splits the sequence over context ranks."""
    pipeline: int
    schedule: str
    chunks: int
    partition: tuple[int, ...]
    """Layers of each stage."""
    table: Table | None
    """The schedule where a user drew it."""
    replicas: tuple[int, ...]
    """Ranks over which each stage is replicated where they differ (DAPPLE, 2007.01045); empty:
    equally.
    """
    adapter_rank: int
    """Of low-rank adapters; 0: the whole model is trained."""
    adapts_all_projections: bool
    """Whether every projection carries an adapter, or attention's alone."""
    dropout: bool
    """Whether both branches of every layer are dropped from, by masks that are drawn again in
    backward.
    """

    @property
    def splits_backward(self) -> bool:
        """Whether backwards come in two halves."""
        return (
            self.table.split
            if self.table is not None
            else self.schedule.startswith(("zb", "dualpipe"))
        )


@dataclass(frozen=True)
class SearchedConfig:
    """What differs between candidates: floats, or arrays that broadcast against each other."""

    tensor: Number
    context: Number
    expert: Number
    grid: tuple[Number, Number]
    """Sides of a higher-dimensional tensor grid: [q, d] of q x q x d, or [l, l] of l x l x l;
    [tensor, 1] if 1-D.
    """
    micro_batch: Number
    sequence: Number
    """1 where norms and residuals are split over the tensor ranks."""
    shard: Number
    """Ranks over which ZeRO shards."""
    offload_optimizer: Number
    offload_parameters: Number
    reduce_microbatch: Number
    keep_gathered: Number
    overlap: Number
    bucket_bytes: Number
    gradient_element_bytes: Number
    """Bytes of a gradient as it adds up and is reduced; 0: decided as `auto` in a plan."""
    selective: Number
    recomputed_layers: Array
    """Layers recomputed in full, by pipeline rank (first axis)."""
    layers_after_recomputed: Array
    """Layers behind the last of them on its rank, which keep all."""
    strides: dict[str, Number]
    """Axis -> distance in ranks between neighbours along it."""


def fixed_config(plan: ResolvedPlan) -> FixedConfig:
    """What a complete plan fixes."""
    s, t = plan.strategy, plan.training
    assert isinstance(s.pipeline.partition, list), "complete() the plan first"
    narrow, kept = DTYPE_BYTES[s.precision] < 4, framework_profile(s.stack)
    moments = float(moment_bytes(t.optimizer))
    master = float(master_bytes(t.optimizer, s.precision))
    if narrow and kept.optimizer >= 0 and t.optimizer.master == "auto":
        master = kept.optimizer - moments
    return FixedConfig(
        shape=plan.shape,
        gpu=plan.gpu,
        fabric=plan.fabric,
        gpus_per_node=int(plan.cluster.gpus_per_node or 1),
        world_size=plan.world_size,
        global_batch=t.global_batch,
        sequence_length=t.sequence_length,
        precision=s.precision,
        kernels=s.kernels,
        stack=s.stack,
        framework=kept,
        parameter_bytes=kept.parameters
        if narrow and kept.parameters > 0
        else DTYPE_BYTES[s.precision],
        gradient_bytes=kept.gradients if narrow else -1.0,
        gradient_accumulator_bytes=kept.accumulator
        + kept.bf16_accumulator * (s.precision == "bf16"),
        moment_bytes=moments,
        master_bytes=max(0.0, master),
        **_stepped(plan),
        zero=s.data.zero,
        num_zero_in_flight=s.data.in_flight,
        algorithm=s.tensor.algorithm,
        context_algorithm=s.context.algorithm,
        has_context_parallel=s.context.size > 1,
        pipeline=s.pipeline.size,
        schedule=s.pipeline.schedule,
        chunks=s.pipeline.chunks,
        partition=tuple(s.pipeline.partition),
        replicas=tuple(s.pipeline.replicas or ()),
        table=drawn(plan),
        adapter_rank=t.lora.rank if t.lora else 0,
        adapts_all_projections=bool(t.lora and t.lora.targets == "all"),
        dropout=t.dropout > 0,
    )


def _stepped(plan: Plan) -> dict[str, float]:
    """In what our engine makes a step, and what it casts for that: AdamW of bf16 alone is stepped
    as it is kept.
    """
    optimizer, parameter = plan.training.optimizer, DTYPE_BYTES[plan.strategy.precision]
    target = 4.0 if optimizer.master == "auto" else parameter
    moment = 2.0 if optimizer.moments == "bf16" else 4.0
    as_kept = (
        optimizer.name == "adamw"
        and plan.strategy.precision in ("bf16", "fp8")
        and target == moment == 2.0
    )
    element = 2.0 if as_kept else 4.0
    widened = (target < element) + num_moments(optimizer) * (moment < element)
    return {"step_element_bytes": element, "step_cast_bytes": element * widened}


def searched_config(plan: ResolvedPlan) -> SearchedConfig:
    """The one candidate that a complete plan is."""
    s, sizes = plan.strategy, plan.sizes
    recomputed, kept_after = recomputed_layers_of(plan)
    replicas = sizes["data"] * sizes["context"]
    mean = plan.world_size / (sizes["tensor"] * sizes["context"] * sizes["pipeline"])
    return SearchedConfig(
        tensor=sizes["tensor"],
        context=sizes["context"],
        expert=s.expert.size,
        grid=tensor_grid(plan),
        micro_batch=plan.training.micro_batch,
        sequence=float(s.tensor.sequence),
        shard=replicas if s.data.shard == "all" else s.data.shard,
        offload_optimizer=float(s.data.offload != "none"),
        offload_parameters=float(s.data.offload == "parameters"),
        reduce_microbatch=float(s.data.reduce == "microbatch"),
        keep_gathered=float(s.data.keep_gathered),
        overlap=float(s.data.overlap),
        bucket_bytes=s.data.bucket_mib * 2**20,
        gradient_element_bytes=gradient_dtype_bytes(s.gradient_dtype, DTYPE_BYTES[s.precision]),
        selective=float(s.recompute == "selective"),
        recomputed_layers=recomputed,
        layers_after_recomputed=kept_after,
        strides=axis_strides(s.placement, sizes | {"data": mean}),
    )


def gradient_dtype_bytes(dtype: str, parameter: int) -> int:
    """Bytes of a gradient of a plan's `gradient_dtype`; 0 for `auto`."""
    return 0 if dtype == "auto" else parameter if dtype == "parameters" else DTYPE_BYTES[dtype]


def tensor_grid(plan: Plan) -> tuple[int, int]:
    """(q, d) of a tensor grid."""
    size = plan.strategy.tensor.size
    if isinstance(size, int):
        return size, 1
    return size[0], size[2] if len(size) > 2 else 1


def axis_strides(placement: list[Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Distance in ranks between neighbours along each axis; `placement` is innermost first."""
    result: dict[str, Any] = {}
    stride: Any = 1
    for axis in placement:
        result[axis] = stride
        stride = stride * sizes[axis]
    return {axis: result[axis] for axis in AXES}


def layer_homes(s: FixedConfig) -> NDArray[np.int64]:
    """The pipeline rank of every layer."""
    return np.repeat(stage_homes(s.pipeline, s.schedule, len(s.partition), s.table), s.partition)


def stage_homes(
    pipeline: int, schedule: str, stages: int, table: Table | None
) -> NDArray[np.int64]:
    """The pipeline rank of every stage; V-shaped schedules go there and back, a drawn table says so
    itself.
    """
    if table is not None:
        return np.array(table.placement)
    stage = np.arange(stages)
    ranks = stage % pipeline
    back = schedule in ("zb-v", "dualpipe-v")
    return np.where((stage // pipeline % 2 == 1) & back, pipeline - 1 - ranks, ranks)


def recomputed_layers_of(plan: ResolvedPlan) -> tuple[Array, Array]:
    """(layers recomputed in full, those behind the last of them) on each pipeline rank of a
    complete plan.
    """
    pipeline, recompute = plan.strategy.pipeline, plan.strategy.recompute
    assert isinstance(pipeline.partition, list)
    homes = stage_homes(pipeline.size, pipeline.schedule, len(pipeline.partition), drawn(plan))
    where = np.repeat(homes, pipeline.partition)
    chosen = (
        np.isin(np.arange(len(where)), recompute)
        if isinstance(recompute, list)
        else recompute == "full"
    )
    return count_recomputed(where, np.broadcast_to(chosen, where.shape), pipeline.size)


def count_recomputed(
    where: NDArray[np.int64], chosen: NDArray[np.bool_], pipeline: int
) -> tuple[Array, Array]:
    """(layers `chosen`, layers behind the last chosen one, 0 where there is none) on each rank;
    `where` is each layer's rank.
    """
    number = np.bincount(where[chosen], minlength=pipeline).astype(float)
    own = [np.flatnonzero(chosen[where == rank]) for rank in range(pipeline)]
    held = np.bincount(where, minlength=pipeline)
    return number, np.array(
        [held[rank] - 1 - at[-1] if len(at) else 0 for rank, at in enumerate(own)], dtype=float
    )
