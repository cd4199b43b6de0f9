"""Configuration of the cost model: what all candidates share, and what a search varies.

The same functions price one plan and millions: a quantity is a float, or an array with one entry
per candidate. A quantity that differs between the ranks that are evaluated has them along its first
axis and candidates along the axes behind it. NumPy's broadcasting then evaluates what depends on
few axes once, on few elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from workbench.costmodel.frameworks.framework_profile import FrameworkProfile, plan_profile
from workbench.costmodel.inputs.operator_strategies import OperatorStrategies, RankGrid
from workbench.costmodel.inputs.traced_stages import TracedStages
from workbench.machine.hardware import GPU, Fabric
from workbench.plan.model.block_linears import adapted_by_layer, first_backward_layer
from workbench.plan.model.four_bit_base import four_bit_format
from workbench.plan.model.model_shape import Shape
from workbench.plan.optimizer_state import DTYPE_BYTES, master_bytes, moment_bytes, num_moments
from workbench.plan.rank_placement import RankPlace, axis_strides, table_row
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.strategy.recompute_rules import recomputed_layers
from workbench.plan.schedule_table import drawn, pair_groups, stages_in_flight, transport
from workbench.plan.schema import NARROW, Plan
from workbench.runtime_facts.four_bit_sizes import FourBitFormat
from workbench.schedules import Table, Transport, generate, round_robin, warm_up
from workbench.schedules.generators import SCHEDULES

Array = NDArray[np.float64]
Number: TypeAlias = float | NDArray[np.floating[Any]]
"""A float, or an array with one entry per candidate."""
Mask: TypeAlias = bool | np.bool_ | NDArray[np.bool_]
"""A condition, or an array with one entry per candidate."""


@dataclass(frozen=True)
class FixedConfig:
    """What all candidates of one evaluation share."""

    shape: Shape
    gpu: GPU
    fabric: Fabric
    gpus_per_node: int
    """GPUs in a node."""
    world_size: int
    global_batch: int
    sequence_length: int
    precision: str
    kernels: str
    attention: str
    """Attention kernel: flash, efficient or math; auto: the framework's own."""
    separate_documents: bool
    """Whether attention ends at the documents of a packed sequence."""
    stack: str
    framework: FrameworkProfile
    """Framework profile that `stack` names, on this GPU."""
    parameter_bytes: float
    """Bytes per stored parameter that is trained."""
    gradient_bytes: float | None
    """Bytes per stored gradient; None: those of the dtype it is reduced in."""
    gradient_accumulator_bytes: float
    """Bytes per parameter of a second, unsharded gradient buffer."""
    moment_bytes: float
    """Bytes of optimizer moments per parameter."""
    narrow_moments: int
    """Moments per parameter that are narrower than fp32."""
    master_bytes: float
    """Bytes of the fp32 master weight per parameter."""
    step_element_bytes: float
    """Bytes per element of the dtype in which this engine's optimizer computes its step."""
    step_cast_bytes: float
    """Bytes per parameter of weights and moments stored in a narrower dtype and upcast for the
    step.
    """
    zero: int
    num_zero_in_flight: int
    """Units that ZeRO-3 all-gathers, and buckets that ZeRO-2 or 3 reduce-scatters, at once."""
    tile_factor: int
    """Tiles of each linear of a layer, which ZeRO-3 gathers and reduces one by one."""
    offloads_to_disk: float
    """1 where offloaded states are on disks, and pass through host memory."""
    has_pairs: bool
    """Whether the loss is of pairs of answers, by preference, not of tokens."""
    reference_pass: bool
    """Whether each step begins with forward passes of a preference's reference."""
    delays_update: float
    """1 where the host steps by the last step's gradients while the next step is computed."""
    offloads_checkpoints: float
    """1 where inputs of recomputed layers are in host memory."""
    algorithm: str
    """Tensor parallelism: 1d, 2d, 2.5d or 3d."""
    expert_tensor: int
    """Tensor ranks that split an expert; 0: all of them."""
    context_algorithm: str
    """Context parallelism: ring, ulysses or usp."""
    ulysses_size: int
    """Ranks of an all-to-all group of usp."""
    has_context_parallel: bool
    """Whether any candidate shards the sequence over context ranks."""
    pipeline: int
    schedule: str
    chunks: int
    partition: tuple[int, ...]
    """Number of layers of each stage."""
    table: Table | None
    """Custom schedule, where the plan names one."""
    in_flight: tuple[int, ...]
    """Microbatches in flight of each stage, where the plan bounds them; empty: the schedule's
    own.
    """
    transport: Transport
    """How the backend of the plan's device lets P2P transfers progress."""
    pair_groups: bool
    """Whether each pair of pipeline ranks has a process group of its own."""
    in_turn: bool
    """Whether the replicas of a stage take microbatches in turn (PipeDream, SOSP'19)."""
    replicas: tuple[int, ...]
    """Number of ranks that replicate each stage, where stages differ (DAPPLE, 2007.01045); empty:
    all alike.
    """
    adapter_rank: int
    """Rank of LoRA adapters; 0: the whole model is trained."""
    adapted: tuple[tuple[str, ...], ...]
    """Names in their block of the linear layers that have an adapter, by layer; empty without
    adapters.
    """
    four_bit: FourBitFormat | None
    """How the linear layers of a frozen base are stored in 4 bits, where they are."""
    drops_adapter_inputs: bool
    """Whether adapters have dropout, each of its own copy of its input."""
    dropout: bool
    """Whether both residual branches of a layer apply dropout, with masks that backward draws
    again.
    """

    operators: OperatorStrategies | None = None
    """Where the tensor ranks are a grid over which each module is sharded in its own way."""
    traced: TracedStages | None = None
    """The graph of a user's module, in place of what a shape would say."""

    @property
    def grid(self) -> RankGrid | None:
        """The grid that tensor ranks are, where a microbatch runs on shapes."""
        return self.traced if self.operators is None else self.operators

    def table_row(self, place: RankPlace) -> int:
        """The row of the schedule's table that a rank's actions are in."""
        return table_row(place, self.replicas, self.in_turn)

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule splits a backward (B) into input gradient (I) and weight gradient
        (W).
        """
        if self.table is not None:
            return self.table.split
        return self.pipeline > 1 and SCHEDULES[self.schedule].splits_backward


@dataclass(frozen=True)
class SearchedConfig:
    """What differs between candidates: floats, or arrays that broadcast against each other.

    Switches are 0.0 or 1.0. Fields without a description are the plan's fields of that name.
    """

    tensor: Number
    context: Number
    expert: Number
    grid: tuple[Number, Number]
    """Sides of a tensor grid: [q, d] of q x q x d, [l, l] of l x l x l, [tensor, 1] where 1-D."""
    micro_batch: Number
    sequence: Number
    """1 where norms and residuals are sharded over the tensor ranks (sequence parallelism,
    2205.05198).
    """
    shard: Number
    """Number of ranks over which ZeRO shards."""
    offload_optimizer: Number
    offload_parameters: Number
    reduce_microbatch: Number
    keep_gathered: Number
    overlap: Number
    bucket_bytes: Number
    gradient_element_bytes: Number
    """Bytes per gradient as it is accumulated and reduced; 0: `auto`, resolved per candidate."""
    selective: Number
    recomputed_layers: Array
    """Number of fully recomputed layers by stage: of each rank, one rank after the other (first
    axis).
    """
    layers_after_recomputed: Array
    """The same of layers behind the last recomputed one of the stage, which save all their
    activations.
    """
    strides: dict[str, Number]
    """Axis -> distance in ranks between neighbors along it."""


def fixed_config(plan: ResolvedPlan) -> FixedConfig:
    """Build the fixed part of the configuration of a resolved plan."""
    s, t = plan.strategy, plan.training
    assert isinstance(s.pipeline.partition, list), "complete() the plan first"
    framework = plan_profile(plan)
    states, planned = framework.model_states, float(DTYPE_BYTES[s.precision])
    narrow = num_moments(t.optimizer) * (t.optimizer.moments != "fp32")
    master = states.master_bytes(
        planned,
        num_moments(t.optimizer),
        states.is_precision_aware(s.precision, narrow > 0),
        float(master_bytes(t.optimizer, s.precision)),
        t.optimizer.master == "auto",
    )
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
        attention=s.attention if framework.kernels.counts_operators else "auto",
        separate_documents=plan.corpus.separate_documents,
        stack=s.stack,
        framework=framework,
        parameter_bytes=states.parameter_bytes(planned),
        gradient_bytes=states.gradient_bytes(planned),
        gradient_accumulator_bytes=states.accumulator_bytes(s.precision),
        moment_bytes=float(moment_bytes(t.optimizer)),
        narrow_moments=narrow,
        master_bytes=master,
        **_stepped(plan),
        zero=s.data.zero,
        num_zero_in_flight=s.data.in_flight,
        tile_factor=s.data.tile_factor,
        offloads_to_disk=float(s.data.offload_tier == "disk"),
        has_pairs=plan.finetune is not None and plan.finetune.preference is not None,
        reference_pass=runs_reference(plan),
        delays_update=float(t.optimizer.delayed_update),
        offloads_checkpoints=float(s.offload_activations),
        algorithm=s.tensor.algorithm,
        expert_tensor=s.expert.tensor or 0,
        context_algorithm=s.context.algorithm,
        ulysses_size=s.context.ulysses_size,
        has_context_parallel=s.context.size > 1,
        pipeline=s.pipeline.size,
        schedule=s.pipeline.schedule,
        chunks=s.pipeline.chunks,
        partition=tuple(s.pipeline.partition),
        in_turn=s.pipeline.is_round_robin,
        replicas=tuple(s.pipeline.replicas or ()),
        table=drawn(plan),
        in_flight=_bounded_in_flight(plan),
        transport=transport(plan.gpu),
        pair_groups=pair_groups(plan),
        adapter_rank=plan.lora.rank if plan.lora else 0,
        adapted=adapted_by_layer(plan.shape, plan.lora) if plan.lora else (),
        four_bit=four_bit_format(plan),
        drops_adapter_inputs=bool(plan.lora and plan.lora.dropout),
        dropout=t.dropout > 0,
        operators=None,
    )


def runs_reference(plan: Plan) -> bool:
    """Whether a step compares with a reference that it computes: of full fine-tuning it is known
    before the first step.
    """
    return plan.lora is not None and plan.finetune is not None and bool(plan.finetune.preference)


def _stepped(plan: Plan) -> dict[str, Any]:
    """Dtype sizes of the optimizer step of this engine: AdamW whose tensors are all bf16 runs in
    bf16, every other step in fp32.
    """
    optimizer, parameter = plan.training.optimizer, DTYPE_BYTES[plan.strategy.precision]
    target = 4.0 if optimizer.master == "auto" else parameter
    moment = 2.0 if optimizer.moments == "bf16" else 4.0
    as_kept = (
        optimizer.name == "adamw"
        and plan.strategy.precision in ("bf16", *NARROW)
        and target == moment == 2.0
    )
    element = 2.0 if as_kept else 4.0
    widened = (target < element) + num_moments(optimizer) * (moment < element)
    return {"step_element_bytes": element, "step_cast_bytes": element * widened}


def _bounded_in_flight(plan: ResolvedPlan) -> tuple[int, ...]:
    """`FixedConfig.in_flight`; a bound that lets the schedule have its own number is none."""
    p = plan.strategy.pipeline
    held = None if p.in_flight is None else stages_in_flight(plan)
    turns = p.replicas if p.is_round_robin else None
    return () if held is None or held == warm_up(p.schedule, p.size, replicas=turns) else held


def searched_config(plan: ResolvedPlan, stages: Sequence[int]) -> SearchedConfig:
    """Build the searched part of a resolved plan: the one candidate that it is.

    Args:
        plan: The plan.
        stages: Pipeline ranks of the ranks that are evaluated.
    """
    s, sizes, at = plan.strategy, plan.sizes, np.array(stages)
    pipeline = s.pipeline
    assert isinstance(pipeline.partition, list), "complete() the plan first"
    run = stages_that_run(pipeline.size, pipeline.partition)
    homes = stage_homes(pipeline.size, pipeline.schedule, len(run), drawn(plan))
    own = np.concatenate(stages_of_each(homes, stages))
    recomputed, kept_after = (layers[own] for layers in recomputed_layers_of(plan))
    mean = plan.world_size / (sizes["tensor"] * sizes["context"] * sizes["pipeline"])
    return SearchedConfig(
        tensor=sizes["tensor"],
        context=sizes["context"],
        expert=s.expert.size,
        grid=tensor_grid(plan),
        micro_batch=plan.training.micro_batch,
        sequence=float(s.tensor.sequence),
        shard=_replica_shards(plan, at) if s.data.shard == "all" else s.data.shard,
        offload_optimizer=s.data.offload_ratio * (s.data.offload != "none"),
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


def _replica_shards(plan: ResolvedPlan, stages: NDArray[np.int64]) -> Number:
    """Ranks that hold the same parameters as each of `stages`, where stages have replicas of their
    own; else as any rank.
    """
    sizes, replicas = plan.sizes, plan.strategy.pipeline.replicas
    data = np.array(replicas, dtype=float)[stages] if replicas else sizes["data"]
    return data * sizes["context"]


def gradient_dtype_bytes(dtype: str, parameter: int) -> int:
    """Bytes per gradient of a plan's `gradient_dtype`, given the bytes of a parameter; 0 for
    `auto`.
    """
    return 0 if dtype == "auto" else parameter if dtype == "parameters" else DTYPE_BYTES[dtype]


def tensor_grid(plan: Plan) -> tuple[int, int]:
    """Sides (q, d) of the plan's tensor grid; (size, 1) where it is 1-D."""
    size = plan.strategy.tensor.size
    if isinstance(size, int):
        return size, 1
    return size[0], size[2] if len(size) > 2 else 1


def named_table(s: FixedConfig, microbatches: int) -> Table:
    """The table of a named schedule, of so many microbatches of a step."""
    held = s.in_flight or None
    if s.in_turn:
        name = s.schedule if s.pipeline > 1 else "1f1b"  # one stage has nothing to order
        return round_robin(name, s.replicas, microbatches, held if s.pipeline > 1 else None)
    return generate(s.schedule, s.pipeline, microbatches, s.chunks, held)


def layer_homes(s: FixedConfig) -> NDArray[np.int64]:
    """Pipeline rank of every layer, `[layers]`."""
    return np.repeat(stage_homes(s.pipeline, s.schedule, len(s.partition), s.table), s.partition)


def stage_homes(
    pipeline: int, schedule: str, stages: int, table: Table | None
) -> NDArray[np.int64]:
    """Pipeline rank of every stage, `[stages]`.

    Interleaved stages wrap around the ranks; V-shaped schedules run back up through them (zero
    bubble V, 2401.10241), so that rank 0 holds the first and the last stage.
    """
    if table is not None:
        return np.array(table.placement)
    stage = np.arange(stages)
    ranks = stage % pipeline
    back = SCHEDULES[schedule].is_v_shaped
    return np.where((stage // pipeline % 2 == 1) & back, pipeline - 1 - ranks, ranks)


def stages_of_each(homes: NDArray[np.int64], ranks: Sequence[int]) -> list[NDArray[np.int64]]:
    """Numbers of the stages of each of `ranks`, given the rank of every stage."""
    return [np.flatnonzero(homes == rank) for rank in ranks]


def stages_that_run(pipeline: int, partition: Sequence[int]) -> tuple[int, ...]:
    """Layers of each stage; of one rank, which runs all its stages as one."""
    return (sum(partition),) if pipeline == 1 else tuple(partition)


def recomputed_layers_of(plan: ResolvedPlan) -> tuple[Array, Array]:
    """Fully recomputed layers, and layers behind the last of them, by stage."""
    pipeline, recompute = plan.strategy.pipeline, plan.strategy.recompute
    assert isinstance(pipeline.partition, list)
    partition = stages_that_run(pipeline.size, pipeline.partition)
    layers = np.arange(sum(partition))
    chosen = (
        np.isin(layers, recomputed_layers(recompute, plan.shape))
        if isinstance(recompute, list)
        else np.full(layers.shape, recompute == "full")
    )
    adapted = adapted_by_layer(plan.shape, plan.lora) if plan.lora else ()
    return count_recomputed(chosen, partition, adapted)


def count_recomputed(
    chosen: NDArray[np.bool_], partition: Sequence[int], adapted: Sequence[Sequence[str]] = ()
) -> tuple[Array, Array]:
    """Count `chosen` layers by stage, but for those that have no backward.

    Args:
        chosen: Whether each layer is to be recomputed, `[..., layers]`.
        partition: Number of layers of each stage.
        adapted: As `FixedConfig.adapted`.

    Returns:
        (chosen layers, layers behind the last chosen one; 0 where none is chosen), each
        `[..., stages]`.
    """
    end, layer = np.cumsum(partition), np.arange(sum(partition))
    if adapted:
        chosen = chosen & (layer >= first_backward_layer(adapted, partition[0]))
    until = np.cumsum(chosen, axis=-1, dtype=float)[..., end - 1]
    count = np.diff(until, axis=-1, prepend=0.0)
    last = np.maximum.accumulate(np.where(chosen, layer + 1.0, 0.0), axis=-1)[..., end - 1]
    return count, np.where(count > 0, end - last, 0.0)
