"""Communication volume: every collective of a step, with group size, bytes and count.

Axes, kinds and actions are named as a run's telemetry names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from operator import add

import numpy as np

from workbench.costmodel.communication import bucket_volume
from workbench.costmodel.communication.adapter_volume import adapter_collectives
from workbench.costmodel.communication.collective_call import (
    REFERENCE,
    CollectiveCall,
    gradient_dtype_name,
    latent_calls,
    latents_are_apart,
    shared_kv_head_calls,
    width_norm_calls,
)
from workbench.costmodel.communication.float8_volume import float8_collectives
from workbench.costmodel.communication.grid_volume import grid_collectives
from workbench.costmodel.communication.partial_gradients import partial_gradient_sums
from workbench.costmodel.inputs.adapted_layers import with_adapters_off
from workbench.costmodel.inputs.config import Array, Number, stage_homes
from workbench.costmodel.inputs.parameter_tensors import num_stage_tensors, num_tiles, tile_elements
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.operators.operator_calls import axis_collectives, operator_collectives
from workbench.plan.rank_placement import RankPlace
from workbench.plan.stage_replicas import Part, overlaps, own_part, stage_tokens
from workbench.runtime_facts.bucket_packing import shard_parts

STEP_SCALARS_BYTES = 12.0
"""Loss, squared gradient norm and stop flag: three fp32 numbers that all ranks all-reduce once a
step.
"""
PAIR_METRICS_BYTES = 12.0
"""Three further fp32 numbers of a step on pairs: its sums of rewards and accuracy."""


def step_collectives(w: Workload) -> list[CollectiveCall]:
    """All collectives of a step.

    Gradient buckets count as equally large; `exact_collectives` packs them as the engine does.
    """
    scalars = STEP_SCALARS_BYTES + PAIR_METRICS_BYTES * w.fixed.has_pairs
    everyone = CollectiveCall(
        "world", "all_reduce", w.fixed.world_size, "fp32", scalars, 1.0, "CLIP"
    )
    return [
        *_calls_of_passes(w),
        *_load_balance_calls(w),
        *_reference_calls(w),
        *_pipeline_calls(w),
        *_data_calls(w),
        *partial_gradient_sums(w),
        everyone,
    ]


def exact_collectives(
    w: Workload, all_calls: list[CollectiveCall], place: int
) -> list[CollectiveCall]:
    """Collectives of one rank of one plan, with the engine's own bucket sizes.

    Args:
        w: Per-rank problem sizes of one plan.
        all_calls: What `step_collectives` returns.
        place: Of the rank, among `w.places`.

    Returns:
        The calls that move bytes between at least two ranks.
    """
    own = [_on_rank(call, place) for call in all_calls]
    if w.fixed.framework.data_parallel.packs_buckets:
        dtypes = {"parameter": w.dtype, "gradient": gradient_dtype_name(w)}
        packed = [
            CollectiveCall(axis, kind, group, dtypes.get(dtype, dtype), size, float(count), action)
            for (axis, kind, group, dtype, size, action), count in bucket_volume.bucket_collectives(
                w, place
            ).items()
        ]
        own = [
            call for call in own if call.axis != "data" and call.action != "REDUCE_GRAD"
        ] + packed
    return [call for call in own if call.group_size > 1 and call.count > 0 and call.bytes > 0]


def _on_rank(call: CollectiveCall, place: int) -> CollectiveCall:
    group_size, size, count = (
        _at(value, place) for value in (call.group_size, call.bytes, call.count)
    )
    return replace(call, group_size=round(group_size), bytes=size, count=count)


def _at(value: Number, place: int) -> float:
    return float(np.asarray(value)[place] if np.ndim(value) else value)


def _calls_of_passes(w: Workload) -> list[CollectiveCall]:
    """Of modules in forward and backward."""
    return [
        *_tensor_calls(w),
        *_loss_calls(w),
        *_context_calls(w),
        *(float8_collectives(w) if w.fixed.operators is None else ()),  # else their own
        *_expert_calls(w),
    ]


def _reference_calls(w: Workload) -> list[CollectiveCall]:
    """Of modules in the forward passes of a preference's reference, without aux losses."""
    if not w.fixed.reference_pass:
        return []
    calls = _calls_of_passes(with_adapters_off(w))
    return [replace(call, action=REFERENCE) for call in calls if call.action == "F"]


def _tensor_calls(w: Workload) -> list[CollectiveCall]:
    """Tensor parallelism (Megatron-LM, 1909.08053): two all-reduces per layer in forward and two
    in backward, one for the embedding and one for the head.

    With sequence parallelism (2205.05198) each all-reduce is an all-gather and a reduce-scatter of
    the same bytes, and backward all-gathers each input again for the weight gradient.
    """
    if w.fixed.algorithm != "1d":
        return grid_collectives(w)
    if w.fixed.grid is not None:
        return operator_collectives(w)
    if w.fixed.adapter_rank:
        return adapter_collectives(w)
    t, m, dtype, stream = w.tensor, w.microbatches, w.dtype, w.hidden_activation_bytes
    two, first, last, gathered = 2 * w.layers, w.has_embedding, w.has_head, 2 * w.recomputed_layers
    if w.fixed.expert_tensor and w.shape.moe and not w.shape.moe.shared:
        # Tokens of sequence-parallel ranks go to whole experts as they are.
        two = two - (w.layers - w.dense_layers) * (w.experts_over_tensor == w.tensor)
    # Recomputation skips what backward does not read: the all-reduce at the end of a layer,
    # unless the framework reruns full layers, or a norm follows, whose input it is.
    repeated = 2 if w.shape.norms_outputs else w.fixed.framework.recompute.repeated_all_reduces
    again = repeated * w.recomputed_layers
    on, off = w.searched.sequence, 1 - w.searched.sequence
    # Column-parallel layers that read a latent of the queries have no input as wide as the stream.
    narrow = float(latents_are_apart(w) and w.shape.mla is not None and bool(w.shape.mla.q_rank))
    inputs, gathered = two - narrow * w.layers, gathered - narrow * w.recomputed_layers
    # An MoE layer saves its all-gathered input.
    num_moe_layers = (w.layers - w.dense_layers) * (1 - (w.experts_over_tensor > 1))
    return [
        CollectiveCall("tensor", "all_reduce", t, dtype, stream, off * m * (two + first), "F"),
        CollectiveCall(
            "tensor", "all_reduce", t, dtype, stream, off * m * (inputs + last + again), "B"
        ),
        CollectiveCall("tensor", "all_gather", t, dtype, stream, on * m * (inputs + last), "F"),
        CollectiveCall("tensor", "reduce_scatter", t, dtype, stream, on * m * (two + first), "F"),
        CollectiveCall(
            "tensor",
            "all_gather",
            t,
            dtype,
            stream,
            on * m * (two + first + inputs + last + gathered - num_moe_layers),
            "B",
        ),
        CollectiveCall(
            "tensor", "reduce_scatter", t, dtype, stream, on * m * (inputs + last + again), "B"
        ),
        *latent_calls(w),
        *shared_kv_head_calls(w),
        *width_norm_calls(w),
    ]


def _loss_calls(w: Workload) -> list[CollectiveCall]:
    """Vocabulary-parallel cross-entropy: all-reduces of maximum, and of target logit and sum; of
    pairs, also of log-probabilities of sequences that context ranks share.
    """
    if w.fixed.grid is not None:  # they are among the operators' own
        return []
    count = w.microbatches * w.has_head * (1 + w.shape.mtp_layers)
    found = [
        CollectiveCall(
            "tensor", "all_reduce", w.tiling.column_parts, "fp32", n * 4 * w.tokens, count, "F"
        )
        for n in (1, 2)
    ]
    if w.fixed.has_pairs:
        each, size = w.microbatches * w.has_head, w.sequences * float(w.upcast_bytes)
        over = ("context", "all_reduce", w.searched.context, "fp32")
        found.append(CollectiveCall(*over, size, each, "F"))
    return found


def _context_calls(w: Workload) -> list[CollectiveCall]:
    """Context parallelism: ring attention, Ulysses, or Ulysses within a ring (2405.07719)."""
    if w.fixed.operators is not None:
        return axis_collectives(w, "context")
    return [*_ring_calls(w), *_ulysses_calls(w)]


def _ring_calls(w: Workload) -> list[CollectiveCall]:
    """Ring attention (2310.01889) sends keys and values around, in backward with their gradients
    in fp32. After Ulysses' all-to-all a rank has fewer heads of as many times more tokens.
    """
    dtype, times = w.dtype, w.microbatches * w.layers
    keys = w.kv_head_repeats * (w.k_width + w.v_width) * w.tokens * w.element_bytes
    again = w.microbatches * (w.recomputed_layers + w.searched.selective * w.layers)
    wide = "fp32" if w.element_bytes < w.upcast_bytes else dtype
    sent = [
        ("F", dtype, keys, times),
        ("B", dtype, keys, times + again),
        ("B", wide, keys * (w.upcast_bytes / w.element_bytes), times),
    ]
    return [
        CollectiveCall(
            "context", kind, w.ring, name, size, count * (w.ring - 1), action, "context.ring"
        )
        for action, name, size, count in sent
        for kind in ("send", "recv")
    ]


def _ulysses_calls(w: Workload) -> list[CollectiveCall]:
    """Ulysses (2309.14509) has an all-to-all of queries, keys and values, and one of the output."""
    dtype, times = w.dtype, w.microbatches * w.layers
    keys = w.kv_head_repeats * (w.k_width + w.v_width) * w.tokens * w.element_bytes
    sizes = (
        keys + w.q_width * w.tokens * w.element_bytes,
        w.attended_width * w.tokens * w.element_bytes,
    )
    count = {"F": times, "B": times + w.microbatches * w.recomputed_layers}
    return [
        CollectiveCall(
            "context",
            "all_to_all",
            w.ulysses,
            dtype,
            size,
            count[action],
            action,
            "context.ulysses",
        )
        for action in count
        for size in sizes
    ]


def _expert_calls(w: Workload) -> list[CollectiveCall]:
    """MoE all-to-all: dispatch and combine in each direction. Token counts are exchanged first,
    unless a capacity factor fixes them, and again where recomputation does not keep them.
    """
    moe, dtype = w.shape.moe, w.dtype
    if moe is None:
        return []
    if w.fixed.operators is not None:
        return axis_collectives(w, "expert")
    e, (times, again) = w.searched.expert, _moe_layer_passes(w)
    size, exchanges_counts = (
        w.hidden_activation_bytes * w.routed_rows_per_token,
        float(moe.capacity is None),
    )
    exchanged_again = (
        exchanges_counts * again * (not w.fixed.framework.recompute.keeps_expert_choices)
    )
    counts = {"F": times, "B": times + again}
    return [
        *(
            CollectiveCall("expert", "all_to_all", e, dtype, size, 2 * counts[action], action)
            for action in counts
        ),
        CollectiveCall(
            "expert", "all_to_all", e, "int64", 8.0 * moe.experts, exchanges_counts * times, "F"
        ),
        CollectiveCall("expert", "all_to_all", e, "int64", 8.0 * moe.experts, exchanged_again, "B"),
    ]


def _moe_layer_passes(w: Workload) -> tuple[Number, Number]:
    """Forwards of MoE layers in a step: (first ones, those of recomputation)."""
    sparse = w.layers - w.dense_layers
    again = w.microbatches * w.recomputed_layers * sparse / np.maximum(w.layers, 1)
    return w.microbatches * sparse, again


def _load_balance_calls(w: Workload) -> list[CollectiveCall]:
    """All-reduce of expert counts for the load-balancing loss, over ranks that share sequences."""
    moe = w.shape.moe
    if moe is None or moe.auxiliary_loss == 0 or w.fixed.operators is not None:
        return []
    times, again = _moe_layer_passes(w)
    size, c = w.sequences * moe.experts * float(w.upcast_bytes), w.searched.context
    return [
        CollectiveCall("context", "all_reduce", c, "fp32", size, often, action)
        for often, action in ((times, "F"), (again, "B"))
    ]


def _pipeline_calls(w: Workload) -> list[CollectiveCall]:
    """Sends across stage boundaries, and a tied weight's gradient between both ends."""
    p, dtype = w.pipeline, w.dtype
    if p == 1:
        return []
    found = [
        (kind, group, dtype, size, count)
        for group, size, count in _boundary_transfers(w)
        for kind in ("send", "recv")
    ]
    if w.fixed.reference_pass:
        each = zip(("send", "recv"), _forward_transfers(w))
        group = _transfer_group(w, lambda stage: stage)
        found += [(kind, group, dtype, w.residual_bytes, w.microbatches * n) for kind, n in each]
    gradient, ends = gradient_dtype_name(w), _tied_group(w)
    found += [(kind, ends, gradient, size, count) for kind, size, count in _tied_transfers(w)]
    return [
        CollectiveCall("pipeline", kind, group, dtype, size, count, "P2P")
        for kind, group, dtype, size, count in found
    ]


def _transfer_group(w: Workload, peer: Callable[[int], int]) -> Number:
    """Ranks of the process group over which a stage exchanges with stage `peer(stage)`: those of a
    pipeline, or of both stages where each pair of stages has a group. Of replicas that take turns
    each is a rank of the pipeline.
    """
    replicas, shards = w.fixed.replicas, 1 if w.fixed.in_turn else w.sequence_parallel
    if not w.fixed.pair_groups:
        return sum(replicas) * shards if replicas else w.pipeline
    if not replicas or w.fixed.in_turn:
        return 2
    pairs = [(place.stage, peer(place.stage) % w.pipeline) for place in w.places]
    return np.array([sum(replicas[stage] for stage in pair) for pair in pairs]) * shards


def _tied_group(w: Workload) -> Number:
    """Ranks of the process group over which both ends exchange a tied weight's gradient."""
    if replicas := w.fixed.replicas:
        return (replicas[0] + replicas[-1]) * w.searched.context
    return _transfer_group(w, lambda stage: w.pipeline - 1 - stage)


def _tied_transfers(w: Workload) -> Iterator[tuple[str, Number, Number]]:
    """(kind, bytes, times a step) of a tied weight's gradient between both ends: the whole of it,
    or a rank's shard, which is smaller or larger than the other end's where both have other
    replicas.
    """
    is_exchanged = float(w.shape.tied and not w.fixed.adapter_rank)
    ends = w.zeros + is_exchanged * abs(w.has_embedding - w.has_head)
    table = w.table_params * w.gradient_element_bytes
    if not w.fixed.replicas:
        shard = w.searched.shard if w.zero else 1
        size = np.ceil(w.table_params / shard) * w.gradient_element_bytes
        yield from (("send", size, ends), ("recv", size, ends))
    elif not w.zero:
        first, last = w.fixed.replicas[0], w.fixed.replicas[-1]
        context = w.searched.context
        other = context * np.where(w.has_embedding > 0, last, first)
        holder = np.array([place.holder for place in w.places])
        yield "send", table, ends * np.ceil((other - holder) / (w.data * context))
        yield "recv", table, ends
    else:
        for elements in _shared_with_peers(w.places, _tied_shards(w)):
            size = elements * w.gradient_element_bytes
            yield from (("send", size, ends), ("recv", size, ends))


def _tied_shards(w: Workload) -> Callable[[RankPlace], tuple[Part, list[Part]] | None]:
    """(own shard, those of the other end) of a tied weight's gradient by rank of the first and the
    last stage, where ZeRO shards it over other numbers of replicas at both ends.
    """
    numel, context = int(np.max(w.table_params)), int(w.searched.context)
    first, last = (shard_parts(numel, w.fixed.replicas[stage] * context) for stage in (0, -1))
    ends = {0: (first, last), w.pipeline - 1: (last, first)}

    def shards(place: RankPlace) -> tuple[Part, list[Part]] | None:
        if place.stage not in ends:
            return None
        own, others = ends[place.stage]
        return own[place.holder], others

    return shards


def _shared_with_peers(
    places: Sequence[RankPlace], parts: Callable[[RankPlace], tuple[Part, Sequence[Part]] | None]
) -> Iterator[Array]:
    """Items that each rank shares with its first peer, its second and so on; 0 where it has none.

    Args:
        places: The ranks.
        parts: (own part, parts of the peers) of a rank; None where it has no peers.
    """
    each = [parts(place) for place in places]
    shared = [[b - a for _, (a, b) in overlaps(*both)] if both else [] for both in each]
    yield from (np.array(items, float) for items in zip_longest(*shared, fillvalue=0))


def _boundary_transfers(w: Workload) -> Iterator[tuple[Number, Number, Number]]:
    """(ranks of the group, bytes, times a step) of what a rank sends across its stage's boundaries,
    and receives.

    Where replicas of a stage share each microbatch, a rank exchanges with every rank of a
    neighboring stage the tokens that both have.
    """
    if not w.fixed.replicas or w.fixed.in_turn:
        times = w.microbatches * (w.zeros + w.num_boundary_transfers)
        yield _transfer_group(w, lambda stage: stage), w.residual_bytes, times
        return
    one = w.hidden_activation_bytes / w.tokens
    length = w.fixed.sequence_length // int(w.searched.context)
    parts = stage_tokens(
        int(w.searched.micro_batch), length, w.fixed.replicas, int(w.sequence_parallel)
    )
    for side in (-1, 1):
        group = _transfer_group(w, partial(add, side))

        def beside(place: RankPlace, side: int = side) -> tuple[Part, list[Part]] | None:
            if not 0 <= place.stage + side < len(parts):
                return None
            own = own_part(parts, w.fixed.replicas, place.stage, place.replica, place.tensor)
            return own, parts[place.stage + side]

        for tokens in _shared_with_peers(w.places, beside):
            yield group, one * tokens, w.microbatches * (tokens > 0)


def _forward_transfers(w: Workload) -> Iterator[Array]:
    """(sends, receives) of one microbatch's forward, across boundaries of a rank's stages that lie
    between two ranks.
    """
    s, at = w.fixed, [place.stage for place in w.places]
    homes = stage_homes(s.pipeline, s.schedule, len(s.partition), s.table)
    apart = homes[1:] != homes[:-1]
    for ends in (homes[:-1][apart], homes[1:][apart]):
        yield w.zeros + np.bincount(ends, minlength=s.pipeline)[at].reshape(w.zeros.shape)


def _data_calls(w: Workload) -> list[CollectiveCall]:
    """Data parallelism: gradients once a step in buckets.

    ZeRO (1910.02054) reduce-scatters gradients and all-gathers parameters: once after the step
    under ZeRO-1 and 2, before every forward and backward under ZeRO-3.
    """
    counts = w.param_counts
    found = _group_calls(w, counts.trained_dense, [counts.dense, counts.adapters], 1.0)
    if w.shape.moe is None:
        return found
    # Experts that other ranks hold are replicated, and sharded, over fewer ranks.
    trained, gathered = counts.trained_experts, [counts.experts, counts.expert_adapters]
    spread = w.searched.expert / w.experts_over_tensor
    if np.ndim(spread) == 0:
        return found + _group_calls(w, trained, gathered, spread)
    # Of candidates those that spread no experts exchange over the same links as a dense model.
    for each, those in ((1.0, spread == 1), (spread, spread != 1)):
        calls = _group_calls(w, trained, gathered, each)
        found += [replace(call, count=call.count * those) for call in calls]
    return found


def reductions_a_step(w: Workload) -> Number:
    """How often gradients are reduced in a step: in every microbatch's backward, or the last."""
    return 1 + w.reduce_microbatch * float(w.zero >= 2) * (w.microbatches - 1)


def _group_calls(
    w: Workload, elements: Array, gathered: Sequence[Array], spread: Number
) -> list[CollectiveCall]:
    """Reductions of `elements` gradients, and all-gathers of each of `gathered` parameters, which
    each of `spread` ranks holds a part of its own of.
    """
    group = w.data * w.searched.context / spread
    shard = np.maximum(1.0, w.searched.shard / spread)
    # Experts' states lie over every `spread`-th of these ranks: their links are the axis' own.
    alone = np.ndim(spread) == 0 and spread == 1
    within, between = ("data.shard", "data.replicas") if alone else ("", "")
    reductions = _reductions(w, elements, group, shard, within, between)
    if w.zero == 0:
        return reductions
    if w.zero < 3:
        return [*reductions, _updated_parameters(w, elements * w.element_bytes, shard, within)]
    unshards = (_unshards(w, each, shard, within) for each in gathered if each.any())
    return [*reductions, *chain.from_iterable(unshards)]


def _reductions(
    w: Workload, elements: Array, group: Number, shard: Number, within: str, between: str
) -> list[CollectiveCall]:
    """Reductions of `elements` gradients over `group` ranks, `shard` of which shard them."""
    gradient, behavior = gradient_dtype_name(w), w.fixed.framework.data_parallel
    action = "B" if w.pipeline == 1 else "REDUCE_GRAD"
    size = elements * w.gradient_element_bytes
    if behavior.reduces_late(w.zero):
        return [CollectiveCall("data", "all_reduce", group, gradient, size, 1.0, "REDUCE_GRAD")]
    count = np.maximum(1.0, np.ceil(size / w.searched.bucket_bytes))
    if w.zero == 0 or (w.zero == 1 and behavior.reduces_whole):
        bucket = size / count
        return [CollectiveCall("data", "all_reduce", group, gradient, bucket, count, action)]
    if w.zero == 3 or (w.zero == 2 and behavior.reduces_units):
        count = num_zero3_units(w)
    scatter, reduce = ("data", "reduce_scatter", shard), ("data", "all_reduce", group / shard)
    times = reductions_a_step(w)
    return [
        CollectiveCall(*scatter, gradient, size / count, times * count, action, within),
        CollectiveCall(*reduce, gradient, size / shard, times, action, between),
    ]


def _unshards(w: Workload, gathered: Array, shard: Number, within: str) -> list[CollectiveCall]:
    """All-gathers of `gathered` parameters, unit by unit or tensor by tensor, for forwards and
    backwards.
    """
    kept = np.maximum(w.searched.keep_gathered, w.pipeline > 1)
    behavior = w.fixed.framework.data_parallel
    narrow = behavior.gathers_fp8(w.fixed.precision)
    units = num_stage_tensors(w) if behavior.gathers_tensors else num_zero3_units(w)
    size = gathered * w.element_bytes * (1 - 0.5 * narrow) / units
    backward = units * (1 - kept) * w.microbatches
    forward = units * (kept + (1 - kept) * w.microbatches)
    over = ("data", "all_gather", shard, w.dtype, size)
    return [
        CollectiveCall(*over, forward, "F", within),
        CollectiveCall(*over, backward, "B", within),
        *_unshards_of_reference(w, over, units, within),
        *_recomputed_tiles(w, shard, within),
    ]


def _unshards_of_reference(
    w: Workload, over: tuple[str, str, Number, str, Number], units: Number, within: str
) -> list[CollectiveCall]:
    """The same for the forward passes of a preference's reference, which leave no unit gathered."""
    if not w.fixed.reference_pass:
        return []
    return [CollectiveCall(*over, units * w.microbatches, REFERENCE, within)]


def _recomputed_tiles(w: Workload, shard: Number, within: str) -> list[CollectiveCall]:
    """All-gathers of tiles for forwards that backward repeats; those that stay until their backward
    are left out.
    """
    tiles = num_tiles(w)
    if not tiles:
        return []
    size = tile_elements(w)[0] / tiles * w.element_bytes
    again = tiles - min(tiles, w.fixed.num_zero_in_flight // 2)
    count = w.recomputed_layers * again * w.microbatches
    return [CollectiveCall("data", "all_gather", shard, w.dtype, size, count, "B", within)]


def num_zero3_units(w: Workload) -> Number:
    """Parts of a stage that ZeRO-3 gathers and reduces one by one: layers, embedding, head, and
    tiles of linears.
    """
    return w.layers * (1 + num_tiles(w)) + w.has_embedding + w.has_head


def _updated_parameters(w: Workload, size: Array, shard: Number, sub_axis: str) -> CollectiveCall:
    """Exchange of updated parameters: one all-gather, or a broadcast by every rank that a tensor
    was given to.
    """
    kind, calls = "all_gather", np.asarray(1.0)
    if w.fixed.framework.data_parallel.broadcasts_parameters:
        kind, calls = "broadcast", np.minimum(shard, np.maximum(1.0, _stage_matrices(w)))
    return CollectiveCall("data", kind, shard, w.dtype, size / calls, calls, "OPTIMIZER", sub_axis)


def _stage_matrices(w: Workload) -> Array:
    """Weight matrices of a stage: of attention, of a gated feed-forward three, and of the ends."""
    attention = 2 if w.fixed.framework.kernels.fused_qkv else 4
    return w.layers * (attention + 2 + w.shape.gated) + w.has_embedding + w.has_head
