"""Problem sizes of one rank, computed from a plan or from many candidates at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from workbench.costmodel.inputs.config import (
    Array,
    FixedConfig,
    Number,
    SearchedConfig,
    fixed_config,
    layer_homes,
    named_table,
    searched_config,
    stage_homes,
    stages_of_each,
    stages_that_run,
)
from workbench.costmodel.inputs.operator_stages import rank_parameters, stages_of
from workbench.costmodel.inputs.operator_strategies import OperatorStrategies
from workbench.costmodel.inputs.packed_parameters import BucketElements, packed_params
from workbench.costmodel.inputs.rank_parameters import ParamCounts, count_params
from workbench.costmodel.inputs.rank_shapes import RankShapes
from workbench.costmodel.inputs.tensor_tiling import TensorTiling, tensor_tiling
from workbench.costmodel.inputs.traced_stages import TracedStages
from workbench.plan.model.head_split import num_kv_heads, padded_heads_per_rank
from workbench.plan.model.model_shape import Shape
from workbench.plan.optimizer_state import DTYPE_BYTES
from workbench.plan.rank_placement import RankPlace, first_ranks_of_stages, rank_place
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import require
from workbench.schedules import Table, bounded_names, closed_forms, receives_early, warm_up
from workbench.schedules import in_flight as most_held


@dataclass(frozen=True, eq=False)
class Workload(RankShapes):
    """Per-rank problem sizes with the parameter counts that follow from them."""

    in_buckets: BucketElements | None = None
    """What the engine's buckets hold, of one plan; None of many candidates, in closed form."""

    @cached_property
    def param_counts(self) -> ParamCounts:
        """Parameters of each pipeline rank before data parallelism shards them."""
        return count_params(self)

    @cached_property
    def packed_counts(self) -> ParamCounts:
        """The same with what aligns them in buckets."""
        return packed_params(self, self.param_counts, self.in_buckets)


def workload(
    plan: ResolvedPlan,
    ranks: Sequence[int] | None = None,
    operators: OperatorStrategies | None = None,
    traced: TracedStages | None = None,
) -> Workload:
    """Compute the per-rank problem sizes of a resolved plan.

    Args:
        plan: The plan.
        ranks: Global ranks to evaluate; None: the first of each pipeline stage, of whose replicas
            it has the most sequences. A step's time and model FLOPs are of these.
        operators: The plan's operator strategies, where it has them.
        traced: A user's module, whose plan has a shape that stands in for it.

    Raises:
        PlanError: The plan uses a field that the cost model does not cover; the message names it.
    """
    if traced is None:
        _refuse(plan)
    assert traced or (
        operators is not None or not plan.strategy.operators or plan.strategy.tensor.ranks == 1
    ), "operator strategies are given by `planner.operator_plans`"
    evaluated = first_ranks_of_stages(plan) if ranks is None else ranks
    places = [rank_place(plan, rank) for rank in evaluated]
    searched = searched_config(plan, [place.stage for place in places])
    fixed = replace(fixed_config(plan), operators=operators, traced=traced)
    return assemble_workload(fixed, searched, places)


def assemble_workload(
    s: FixedConfig,
    k: SearchedConfig,
    places: Sequence[RankPlace],
    alike: Sequence[Sequence[int]] | None = None,
) -> Workload:
    """Compute the per-rank problem sizes of many candidates at once.

    Args:
        s: What the candidates share.
        k: What differs between them; arrays broadcast against each other.
        places: Ranks to evaluate, along the first axis.
        alike: Rows of the schedule's table that each of `places` stands for; None: its own.
    """
    alike = tuple(map(tuple, alike or [[s.table_row(place)] for place in places]))
    by_rank = (len(places), *(1,) * (np.ndim(k.recomputed_layers) - 1))
    ranks, replica, *_ = (np.array(x, dtype=float).reshape(by_rank) for x in zip(*places))
    shape, blocks = s.shape, tensor_tiling(s.algorithm, k)
    data = s.world_size / (k.tensor * k.context * s.pipeline)
    layers, dense = stage_layers(s)
    at, rows, sequences, table = ranks.astype(int), ranks, k.micro_batch, s.table
    microbatches = s.global_batch / (k.micro_batch * data)
    if s.replicas:
        data, microbatches = np.array(s.replicas, dtype=float)[at], s.global_batch / k.micro_batch
    # Of what the replicas of a stage share, microbatches or their sequences, the first have most.
    if s.in_turn:
        table = named_table(s, int(microbatches))
        microbatches = np.ceil((microbatches - replica) / data)
        rows = np.array([s.table_row(place) for place in places])
    elif s.replicas:
        sequences = np.ceil((k.micro_batch - replica) / data)
    return Workload(
        fixed=s,
        searched=k,
        places=tuple(places),
        data=data,
        microbatches=microbatches,
        sequences=sequences,
        tokens=sequences * s.sequence_length / (k.context * blocks.token_parts),
        tiling=blocks,
        hidden_per_rank=shape.hidden / blocks.hidden_parts,
        weight_in_dim=shape.hidden / blocks.in_dim_parts,
        **tensor_parallel_widths(
            shape, blocks.column_parts, s.expert_tensor, pads_values=s.framework.kernels.pads_values
        ),
        **_table_rows(s, places, blocks),
        sequence_parallel=1 + k.sequence * (k.tensor - 1),
        element_bytes=DTYPE_BYTES[s.precision],
        gradient_element_bytes=_gradient_element(s, k.gradient_element_bytes, microbatches),
        reduce_microbatch=np.maximum(k.reduce_microbatch, microbatches == 1),
        alike=alike,
        rank_multiplicity=np.array([len(ranks) for ranks in alike], dtype=float).reshape(by_rank),
        layer_indices=_layer_indices(s, places),
        layers=layers[at],
        dense_layers=dense[at],
        recomputed_layers=_sum_over_stages(s, places, k.recomputed_layers),
        has_embedding=(at == 0).astype(float),
        has_head=(at == _last_rank(s)).astype(float),
        num_boundary_transfers=num_boundary_transfers(s)[at],
        microbatches_in_flight=microbatches_in_flight(s, table, microbatches, rows),
        inputs_ahead=inputs_ahead(s, microbatches, ranks, data),
        losses_in_flight=losses_in_flight(s, microbatches),
    )


def tensor_parallel_widths(
    shape: Shape,
    columns: Number,
    expert_columns: int = 0,
    padded: bool = True,
    pads_values: bool = False,
) -> dict[str, Any]:
    """Widths of the widest of `columns` tensor ranks.

    Key-value heads are replicated where there are more ranks than heads.

    Args:
        shape: Shape of the model.
        columns: Number of ranks that shard heads and feed-forward.
        expert_columns: Those of them that shard an expert; 0: all.
        padded: Whether widths are those of the widest rank, or an even share (for model FLOPs,
            where padding is no work).
        pads_values: Whether attention takes latent attention's values as wide as its keys.

    Returns:
        Names of `RankShapes` widths -> elements.
    """
    even = shape.heads / columns, np.maximum(num_kv_heads(shape) / columns, 1.0)
    heads, kv = padded_heads_per_rank(shape, columns) if padded else even
    mla, head = shape.mla, float(shape.head_dim or 0)
    moe = shape.moe
    expert, shared = (moe.ffn, moe.shared * moe.ffn) if moe else (0, 0)
    ffn, expert_ffn, shared_ffn = (
        -(-width // parts) if padded else width / parts
        for width, parts in (
            (shape.ffn, columns),
            (expert, expert_columns or columns),
            (shared, columns),
        )
    )
    q, k, v = (shape.q_width / shape.heads,) * 2 + (mla.value_dim,) if mla else (head, head, head)
    attended = shape.query_dim if mla and pads_values else v
    return {
        "q_width": heads * q,
        "k_width": kv * k,
        "v_width": kv * attended,
        "o_width": heads * v,
        "heads": heads,
        "ffn": ffn,
        "expert_ffn": expert_ffn,
        "shared_ffn": shared_ffn,
    }


def _sum_over_stages(s: FixedConfig, places: Sequence[RankPlace], layers: Array) -> Array:
    """By rank of `places`, what is given for each of its stages (first axis)."""
    run = stages_that_run(s.pipeline, s.partition)
    homes = stage_homes(s.pipeline, s.schedule, len(run), s.table)
    own = stages_of_each(homes, [place.stage for place in places])
    starts = np.cumsum([0, *map(len, own[:-1])])
    return np.asarray(np.add.reduceat(layers, starts, axis=0))


def stage_layers(s: FixedConfig) -> tuple[Array, Array]:
    """Number of (all layers, layers with a dense feed-forward) of each pipeline rank."""
    where = layer_homes(s)
    moe = s.shape.moe
    dense = np.arange(len(where)) < moe.first_dense if moe else np.ones(len(where), dtype=bool)
    every, some = (
        np.bincount(x, minlength=s.pipeline).astype(float) for x in (where, where[dense])
    )
    return every, some


def _layer_indices(s: FixedConfig, places: Sequence[RankPlace]) -> tuple[tuple[int, ...], ...]:
    """Indices of the layers of each of `places`, where adapters tell layers apart."""
    if not s.adapter_rank:
        return ()
    homes = layer_homes(s)
    return tuple(tuple(np.flatnonzero(homes == place.stage).tolist()) for place in places)


def _last_rank(s: FixedConfig) -> int:
    """Pipeline rank of the head, which may stand alone: rank 0 for V-shaped schedules."""
    return int(stage_homes(s.pipeline, s.schedule, len(s.partition), s.table)[-1])


def microbatches_in_flight(
    s: FixedConfig, table: Table | None, microbatches: Number, rank: Array
) -> Array:
    """Microbatches whose activations each pipeline rank saves at its peak; a chunk counts
    1/chunks.

    p - r of 1F1B on rank r of p (2006.09503), all of GPipe (1811.06965), closed forms of
    `schedules` for the rest.
    """
    if s.pipeline == 1:
        return np.asarray(1.0 + 0 * rank)
    if table is not None:
        in_flight: Array = np.asarray(most_held(table), dtype=float)[rank.astype(int)] / s.chunks
        return in_flight
    if s.in_flight:
        bound = np.array(s.in_flight, dtype=float)[rank.astype(int)]
        return np.asarray(np.minimum(bound, microbatches))
    held = closed_forms.in_flight(s.schedule, rank, s.pipeline, microbatches, s.chunks)
    return np.asarray(held / s.chunks, dtype=float)


def inputs_ahead(s: FixedConfig, microbatches: Number, rank: Array, replicas: Number) -> Array:
    """Tensors of a stage's boundary that a rank has received before it needs them, when its memory
    peaks.

    After a warm-up they are the inputs of what the rank before has in flight beyond its own: one
    under 1F1B, two under eager 1F1B; where receives are posted early, rank 0 has a gradient.
    So has each rank but the last under GPipe, whose backward starts after all forwards. Interleaved
    schedules and ZB-H2 run ahead. Those of `replicas` that take turns are spread over them.
    """
    early = receives_early(s.schedule, s.transport)
    if s.schedule in bounded_names():
        before, own = (
            _held_by_stage(s, microbatches, at) for at in (np.maximum(rank - 1, 0), rank)
        )
        gradient = np.minimum(1, own - 1) * early
        spread = replicas if s.in_turn else 1
        return np.asarray((before - own) / spread + gradient * (rank == 0), dtype=float)
    gradient = early * np.minimum(1.0, microbatches - 1) * (rank < s.pipeline - 1)
    ahead: dict[str, Array] = {"gpipe": gradient, "zb-h1": np.minimum(rank, 1.0)}
    return ahead.get(s.schedule, np.ones_like(rank))


def _held_by_stage(s: FixedConfig, microbatches: Number, stage: Array) -> Array:
    """Microbatches in flight of a stage under 1F1B, on all its replicas that take turns."""
    if not s.in_turn:
        return microbatches_in_flight(s, s.table, microbatches, stage)
    found = s.in_flight or warm_up(s.schedule, s.pipeline, replicas=s.replicas)
    held: Array = np.array(found, dtype=float)[stage.astype(int)]
    return held


def num_boundary_transfers(s: FixedConfig) -> Array:
    """Stage boundaries of each pipeline rank that lie between two ranks; at the turn of a V shape
    both stages are on the same rank, and nothing is sent.
    """
    homes = stage_homes(s.pipeline, s.schedule, len(s.partition), s.table)
    apart = homes[1:] != homes[:-1]
    both = np.concatenate((homes[1:][apart], homes[:-1][apart]))
    return np.bincount(both, minlength=s.pipeline).astype(float)


def losses_in_flight(s: FixedConfig, microbatches: Number) -> Number:
    """Microbatches of the last stage between loss and backward: one, or all under GPipe."""
    return microbatches if s.schedule == "gpipe" and s.pipeline > 1 else 1.0


def _rows(shape: Shape, blocks: TensorTiling) -> Number:
    """Vocabulary rows of a tensor rank, padded to a multiple of what one GEMM all-gathers."""
    return (
        np.ceil(shape.vocab / (blocks.column_parts * blocks.gathered_blocks))
        * blocks.gathered_blocks
    )


def _table_rows(
    s: FixedConfig, places: Sequence[RankPlace], blocks: TensorTiling
) -> dict[str, Any]:
    """Rows of the hidden width that a rank's embedding and head are."""
    if s.traced is not None:
        tables = [s.traced.largest(stages_of(s, place.stage)) for place in places]
        return dict.fromkeys(("vocab_rows", "head_rows"), np.array(tables) / s.shape.hidden)
    if s.operators is None:
        return dict.fromkeys(("vocab_rows", "head_rows"), _rows(s.shape, blocks))
    found = [
        {p.name: p.elements / s.shape.hidden for p in rank_parameters(s, place.stage)}
        for place in places
    ]
    vocab = [own.get("embedding.tokens.weight", 0.0) for own in found]
    # Of a tied weight that a rank has once, the head is the embedding.
    head = [
        own.get("head.weight", rows * ("final_norm.weight" in own))
        for own, rows in zip(found, vocab)
    ]
    # Where there is no table, a row stands for what no rank has.
    return {"vocab_rows": np.maximum(1.0, vocab), "head_rows": np.maximum(1.0, head)}


def _gradient_element(s: FixedConfig, written: Number, microbatches: Number) -> Number:
    """Bytes per gradient: as the plan says; `auto` is fp32 where gradients of several microbatches
    are accumulated, and the parameters' dtype under ZeRO.
    """
    parameters = DTYPE_BYTES[s.precision]
    if np.ndim(written) == 0 and written:
        return written
    adds_up = np.maximum(microbatches > 1, s.pipeline > 1) * (s.zero == 0)
    return np.where(written == 0, parameters + (4 - parameters) * adds_up, written)


def _refuse(plan: ResolvedPlan) -> None:
    require(plan, "estimate")
