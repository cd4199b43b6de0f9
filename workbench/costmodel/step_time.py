"""Step time, part by part: compute, exposed communication, pipeline bubble, optimizer, offload."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm

import numpy as np

from workbench.costmodel.communication.collective_call import REFERENCE, CollectiveCall
from workbench.costmodel.communication.collective_cost import (
    AlikeCalls,
    AxisLink,
    alike_calls,
    alike_seconds,
    axis_links,
    collective_seconds,
    comm_seconds,
)
from workbench.costmodel.communication.collective_volume import reductions_a_step, step_collectives
from workbench.costmodel.compute.kernel_rates import DeviceRates, device_rates
from workbench.costmodel.compute.measured_layer import (
    measured_layer_times,
    measured_microbatch_compute,
    measured_optimizer_seconds,
)
from workbench.costmodel.compute.roofline import LayerTimes, MicrobatchCompute, model_flops
from workbench.costmodel.compute.traced_seconds import traced_model_flops
from workbench.costmodel.inputs.adapted_layers import with_adapters_off
from workbench.costmodel.inputs.config import Array, FixedConfig, Number, named_table, stage_homes
from workbench.costmodel.inputs.layer_gemms import column_parallel_share
from workbench.costmodel.inputs.operator_strategies import group_name
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.model_states import owned_params
from workbench.costmodel.offload_time import exposed_offload
from workbench.costmodel.rates.constants import Constants
from workbench.schedules import Table, Timeline, closed_forms, executable, receives_early, simulate

MAX_ACTIONS = 1536
"""Most actions that are simulated; what a longer step adds only repeats."""
RING_OVERLAP_SHARE = 0.8
"""Share of attention's time behind which ring attention hides its sends."""
MIN_EXPOSED_SHARE = 0.15
"""Share of all-gathers that stays exposed: while they run, they take multiprocessors and memory
bandwidth from compute.
"""


@dataclass(frozen=True)
class MicrobatchDurations:
    """Seconds of one microbatch by rank of the workload, and how much is exposed communication."""

    forward: Array
    backward: Array
    weight_grad: Array
    """Part of the backward that computes weight gradients (W)."""
    compute: Array
    idle: Array
    """Part of the compute in which the GPU waits for the host."""
    communication: dict[str, Array]
    """Part of the step (tensor_comm, context_comm, ...) -> exposed seconds of one microbatch."""
    hidden_transfers: Array
    """Seconds in which a microbatch is received at stage boundaries beside the rank's compute."""


@dataclass(frozen=True)
class StepTime:
    """Time of one step of each candidate."""

    seconds: Number
    durations: MicrobatchDurations
    bubble: Number
    after: dict[str, Number]
    """Part of the step -> seconds after the last microbatch."""
    calls: list[CollectiveCall]


def step_time(
    w: Workload,
    constants: Constants,
    layers: LayerTimes | None = None,
    calls: list[CollectiveCall] | None = None,
) -> StepTime:
    """Time of a step: microbatches of the slowest pipeline rank, bubble, and what follows them.

    Args:
        w: Per-rank problem sizes.
        constants: Of the GPU and the framework.
        layers: Seconds of a layer of each kind, where the caller has them already.
        calls: Collectives of a step, where the caller has them already.
    """
    m = device_rates(w.fixed.gpu, w.fixed.precision, constants)
    links, calls = axis_links(w, constants), step_collectives(w) if calls is None else calls
    k = layers or measured_layer_times(w, m)
    durations = _durations(w, m, k, calls, links)
    busy = _longest(w, durations.forward + durations.backward)
    bubble = _bubble_on_shared_cores(_bubble(w, durations, busy), busy, constants.ranks_per_core)
    makespan = busy + bubble
    by_rank = after_by_rank(w, constants, durations, calls)
    after: dict[str, Number] = {part: seconds.max(axis=0) for part, seconds in by_rank.items()}
    stepping = after["optimizer"]
    if w.fixed.delays_update:  # beside the passes of the next step
        after["optimizer"] = np.maximum(0.0, after["optimizer"] - makespan)
    after["offload"] = exposed_offload(w, constants, _owned(w), makespan, stepping)
    if w.fixed.reference_pass:
        own = [replace(call, action="F") for call in calls if call.action == REFERENCE]
        reference = _durations(with_adapters_off(w), m, k, own, links)
        after["reference"] = _forward_makespan(w, reference.forward)
    after["overhead"] = step_overhead(w.fixed.world_size, constants)
    return StepTime(makespan + _sum(after.values()), durations, bubble, after, calls)


def after_by_rank(
    w: Workload, constants: Constants, durations: MicrobatchDurations, calls: list[CollectiveCall]
) -> dict[str, Array]:
    """Part of the step -> seconds after the last microbatch, by rank of the workload."""
    m, links = device_rates(w.fixed.gpu, w.fixed.precision, constants), axis_links(w, constants)
    sums = comm_seconds(calls, links, constants, "tensor", "REDUCE_GRAD")
    return {
        "data_comm": _exposed_data_comm(w, constants, durations, calls, links),
        "optimizer": measured_optimizer_seconds(w, m, _owned(w)),
        "tensor_comm": w.zeros + sums,
    }


def step_overhead(world_size: int, constants: Constants) -> float:
    """Seconds of a step that its size does not change."""
    doublings = constants.step_doubling_ms * math.log2(world_size)
    return 1e-3 * (constants.step_fixed_ms + doublings)


def _owned(w: Workload) -> Array:
    """Parameters whose optimizer states a rank holds."""
    return np.asarray(sum(owned_params(w, w.param_counts)))


def microbatch_durations(
    w: Workload, constants: Constants, calls: list[CollectiveCall]
) -> MicrobatchDurations:
    """Seconds of one microbatch on each rank of `w.places`, given the collectives of a step."""
    m = device_rates(w.fixed.gpu, w.fixed.precision, constants)
    return _durations(w, m, measured_layer_times(w, m), calls, axis_links(w, constants))


def stage_passes(w: Workload, constants: Constants) -> tuple[Array, Array]:
    """Seconds of (a forward, a backward) of one microbatch by pipeline rank, without its transfers
    to and from other stages.
    """
    links, d = axis_links(w, constants), microbatch_durations(w, constants, step_collectives(w))
    forward, backward = (
        np.asarray(seconds - _boundary_seconds(w, links, constants, action))
        for seconds, action in ((d.forward, "F"), (d.backward, "B"))
    )
    return forward, backward


def model_flops_utilization(w: Workload, constants: Constants, time: StepTime) -> Number:
    """Model FLOPs utilization (MFU, 2204.02311): model FLOPs over what all GPUs could do in the
    step.
    """
    m = device_rates(w.fixed.gpu, w.fixed.precision, constants)
    traced = w.fixed.traced
    one = model_flops(w) if traced is None else traced_model_flops(w, traced)
    flops = one * w.step_microbatches * w.tensor * w.searched.context
    return flops / (time.seconds * (w.fixed.world_size * m.flops))


def longest_compute_seconds(w: Workload, time: StepTime) -> Number:
    """Seconds of the step in which the pipeline rank that computes longest computes."""
    return _longest(w, time.durations.compute)


def _longest(w: Workload, passes: Array) -> Number:
    """Seconds of a step of the rank that is busiest with its microbatches, each of `passes`
    seconds.
    """
    if w.fixed.in_turn:  # ranks have other numbers of them
        return np.asarray((w.microbatches * passes).max(axis=0))
    seconds: Number = w.microbatches * passes.max(axis=0)
    return seconds


def _busiest(w: Workload, d: MicrobatchDurations) -> tuple[int, float]:
    """(place of the rank of one plan that is busiest in a step, its microbatches)."""
    passes = d.forward + d.backward
    at = int(np.argmax(w.microbatches * passes if w.fixed.in_turn else passes))
    return at, float(np.broadcast_to(w.microbatches, passes.shape)[at])


def waiting_share(w: Workload, time: StepTime) -> float:
    """Share of the step in which the busiest rank of one plan waits: for a collective, another
    stage or its host.
    """
    d = time.durations
    busiest, microbatches = _busiest(w, d)
    working = microbatches * (d.compute - d.idle)[busiest]
    return float(1 - working / time.seconds)


def compute_seconds_by_rank(w: Workload, constants: Constants) -> list[float]:
    """Seconds of one plan's step in which each rank of `w.places` computes."""
    m = device_rates(w.fixed.gpu, w.fixed.precision, constants)
    work = measured_microbatch_compute(w, m, measured_layer_times(w, m))
    seconds = np.broadcast_to(w.microbatches * (work.forward + work.backward), w.zeros.shape)
    return [float(one) for one in seconds]


def step_time_breakdown(w: Workload, time: StepTime) -> dict[str, float]:
    """The step of one plan, part by part, on its busiest pipeline rank; they add up to
    `time.seconds`.
    """
    d = time.durations
    busiest, microbatches = _busiest(w, d)
    result = {"compute": float(microbatches * d.compute[busiest])}
    result |= {k: float(microbatches * v[busiest]) for k, v in d.communication.items()}
    result["bubble"] = float(time.bubble)
    result |= {
        k: result.get(k, 0.0) + float(v)
        for k, v in time.after.items()
        if k != "offload" or np.any(v)
    }
    return result


def _durations(
    w: Workload,
    m: DeviceRates,
    k: LayerTimes,
    every: list[CollectiveCall],
    wires: dict[str, AxisLink],
) -> MicrobatchDurations:
    """Compute and exposed communication of one microbatch."""
    c, work = m.constants, measured_microbatch_compute(w, m, k)
    hidden = {"F": work.forward, "B": work.backward}
    idle = {"F": work.idle_forward, "B": work.idle_backward}
    attention = {"F": k.attention.forward, "B": k.attention.backward}
    tensor = wires["tensor"]
    bytes_link, latency_link = _tensor_links(w, wires, c)
    exposed: dict[str, dict[str, Array]] = {}
    hides, transfers = hides_transfers(w.fixed), w.zeros
    for action in ("F", "B"):

        def of(axis: str, action: str = action) -> Array:
            return np.asarray(
                w.zeros + comm_seconds(every, wires, c, axis, action) / w.microbatches
            )

        def over(link: dict[str, AxisLink], calls: list[AlikeCalls]) -> Array:
            return np.asarray(w.zeros + alike_seconds(calls, link, c, "tensor") / w.microbatches)

        tensor_calls = alike_calls(every, "tensor", action)
        boundary = _boundary_seconds(w, wires, c, action)
        beside = np.minimum(boundary, hidden[action]) if hides else w.zeros
        transfers = transfers + beside
        exposed[action] = {
            "tensor_comm": np.maximum(0.0, over(bytes_link, tensor_calls) - idle[action])
            + (over(latency_link, tensor_calls) if latency_link else 0.0),
            "pipeline_comm": boundary - beside,
        }
        if w.fixed.has_context_parallel:
            behind = w.layers * (RING_OVERLAP_SHARE * attention[action])
            if wires["context"].measured is not None:
                behind = behind * (w.ring > 1)  # Ulysses waits for its all-to-alls
            exposed[action]["context_comm"] = np.maximum(0.0, of("context") - behind)
        overlaps = w.fixed.grid is None  # else backward waits for every collective
        if action == "B" and overlaps and (tensor.measured is not None or c.backward_overlap):
            hiding: Number
            if tensor.measured is not None:
                hiding = _behind_weight_gradients(w, work, every, wires, c)
            else:
                hiding = _behind_column_parallel_gemms(w, work, bytes_link["tensor"], c)
            shown = np.maximum(0.0, exposed[action]["tensor_comm"] - hiding)
            exposed[action]["tensor_comm"] = np.asarray(shown)
        if w.shape.moe:
            # While the GPU waits for its host, an all-to-all that was launched runs on.
            exposed[action]["expert_comm"] = np.maximum(
                0.0, of("expert") - idle[action] - c.expert_overlap * hidden[action]
            )
        if w.zero == 3:
            ahead = c.gather_overlap * hidden[action]
            if wires["data"].measured is not None:  # gathers started ahead wait beside compute
                ahead = np.minimum(_waits(w, every, wires, c, "data", action), hidden[action])
            gathers, behind = of("data"), ahead * _overlaps_compute(w)
            exposed[action]["data_comm"] = np.maximum(gathers - behind, MIN_EXPOSED_SHARE * gathers)
    return MicrobatchDurations(
        forward=np.asarray(work.forward + _sum(exposed["F"].values())),
        backward=np.asarray(work.backward + _sum(exposed["B"].values())),
        weight_grad=work.weight_grad,
        compute=np.asarray(work.forward + work.backward),
        idle=np.asarray(work.idle_forward + work.idle_backward),
        communication={name: exposed["F"][name] + exposed["B"][name] for name in exposed["F"]},
        hidden_transfers=np.asarray(transfers),
    )


def hides_transfers(s: FixedConfig) -> bool:
    """Whether transfers between stages run beside compute: one of each direction beside a forward
    or a backward, where receives are posted early, and no core of a CPU has to copy them.
    """
    return receives_early(s.schedule) and s.transport == "nccl"


def _tensor_links(
    w: Workload, wires: dict[str, AxisLink], c: Constants
) -> tuple[dict[str, AxisLink], dict[str, AxisLink]]:
    """Links of the tensor axis, and of its groups under operator strategies, by what hides their
    collectives; the second is empty inside nodes.

    GEMMs split into chunks overlap the bytes of tensor-parallel collectives, not their latency.
    While the GPU waits for its host, all of it is hidden except the network's latency: hosts of
    different nodes are late at different times.
    """
    stride, named = w.searched.strides["tensor"], w.fixed.grid
    spans = {"tensor": w.tensor * stride}
    if named is not None:
        spans |= {
            group_name(axes): math.prod(named.group(axes)) * stride for axes in named.groups()
        }
    moved, late = {}, {}
    for name, span in spans.items():
        link, crosses_nodes = wires[name], span > w.fixed.gpus_per_node
        moved[name] = AxisLink(
            link.bandwidth / (1 - c.tensor_overlap),
            link.latency * (1 - crosses_nodes),
            link.measured,
        )
        late[name] = AxisLink(math.inf, link.latency * crosses_nodes)
    return moved, late if np.any(spans["tensor"] > w.fixed.gpus_per_node) else {}


def _behind_weight_gradients(
    w: Workload,
    work: MicrobatchCompute,
    every: list[CollectiveCall],
    wires: dict[str, AxisLink],
    c: Constants,
) -> Array:
    """Seconds that the tensor-parallel reductions of one backward wait while a rank computes: this
    engine reduces the input's gradient of a column-parallel group during the weights' gradients of
    the group, unless these are deferred.
    """
    if w.fixed.algorithm != "1d" or w.fixed.splits_backward:
        return w.zeros
    reductions = [call for call in every if call.kind in ("all_reduce", "reduce_scatter")]
    waits = _waits(w, reductions, wires, c, "tensor", "B")
    return np.minimum(waits, column_parallel_share(w) * work.weight_grad)


def _behind_column_parallel_gemms(
    w: Workload, work: MicrobatchCompute, link: AxisLink, c: Constants
) -> Number:
    """Seconds of tensor-parallel exchanges of one backward beside which column-parallel layers
    compute: two of a dense layer, one of a mixture's, whose experts exchange otherwise.
    """
    num_layers = 2 * w.dense_layers + (w.layers - w.dense_layers)
    gemms = c.backward_overlap * column_parallel_share(w) * work.weight_grad
    stream, on = w.hidden_activation_bytes, w.searched.sequence

    def seconds(kind: str) -> Number:
        return num_layers * collective_seconds(kind, stream, w.tensor, link, c)

    reduced = np.where(on > 0, seconds("reduce_scatter"), seconds("all_reduce"))
    gathered = on * seconds("all_gather")
    hidden: Number = np.minimum(reduced, gemms) + np.minimum(gathered, gemms)
    return hidden


def _waits(
    w: Workload,
    calls: list[CollectiveCall],
    wires: dict[str, AxisLink],
    c: Constants,
    axis: str,
    action: str,
) -> Number:
    """Seconds a microbatch that measured calls of an axis take whatever they move. A rank may
    compute meanwhile; what they copy takes its own core.
    """
    empty = [replace(call, bytes=0.0) for call in calls]
    return comm_seconds(empty, wires, c, axis, action) / w.microbatches


def _overlaps_compute(w: Workload) -> Number:
    """1 where ZeRO-2 and 3 collectives overlap compute; with a single buffer in flight they do
    not.
    """
    return w.searched.overlap * float(w.fixed.num_zero_in_flight > 1)


def _sum(values: Iterable[Number]) -> Number:
    """Sum, smallest arrays first, so that few additions are of full size."""
    return sum(sorted(values, key=np.size), 0.0)


def _boundary_seconds(
    w: Workload, wires: dict[str, AxisLink], constants: Constants, action: str
) -> Array:
    """Seconds in which a rank waits at stage boundaries: for a recv of activations before F and of
    gradients before B, for every chunk; where sends block, for what the rank passes on too. What
    arrives scattered over tensor ranks is all-gathered.
    """
    if w.pipeline == 1:
        return w.zeros
    stream = w.residual_bytes
    gathered: Number = 0.0
    if w.fixed.framework.model_parallel.scatter_gather:  # 2104.04473, 4.1
        whole = 1 - w.searched.sequence
        gathered = whole * collective_seconds(
            "all_gather", stream, w.tensor, wires["tensor"], constants
        )
        stream = stream / (1 + (w.tensor - 1) * whole)
    # Of two stages whose replicas share a microbatch, the ranks of the one with fewer move more.
    if w.fixed.replicas and not w.fixed.in_turn:
        stages = np.array([place.stage for place in w.places])
        beside = (stages + (-1 if action == "F" else 1)) % w.pipeline
        # Ranks are in their order: the first of the stage beside has the most of its tokens.
        stream = np.maximum(stream, np.asarray(stream)[np.searchsorted(stages, beside)])
    one = collective_seconds("recv", stream, w.pipeline, wires["pipeline"], constants)
    ends = (w.has_embedding, w.has_head) if action == "F" else (w.has_head, w.has_embedding)
    transfers = 1 - ends[0] + w.fixed.framework.model_parallel.blocking_sends * (1 - ends[1])
    exposed = 1 - constants.boundary_overlap * (w.fixed.chunks > 1)
    received = 1 - ends[0] + (w.fixed.chunks - 1)
    seconds = one * (transfers + (w.fixed.chunks - 1)) + gathered * received
    return np.asarray(seconds * exposed)


def _bubble(w: Workload, d: MicrobatchDurations, busy: Number) -> Number:
    """Pipeline bubble of the slowest rank while the pipeline fills and drains, in closed form;
    `busy` are its other seconds.

    (p - 1)(F + B) under 1F1B, divided by the chunks of an interleaved schedule (2104.04473). Exact
    for equal stages (`schedules.closed_forms`). Unequal stages take the path through the slowest
    one, and mean stages where backward is split. Where a plan has its own table, or bounds what is
    in flight, the bubble is the simulator's.
    """
    if w.pipeline == 1:
        return 0.0
    s, m = w.fixed, w.microbatches
    if s.table is not None:
        return simulated_schedule(w, d, s.table).makespan - busy
    if s.in_flight or s.in_turn:
        return simulated_makespan(w, d) - busy
    slowest = (d.forward + d.backward).max(axis=0)
    if s.schedule == "gpipe":
        passes = [
            (w.rank_multiplicity * x).sum(axis=0) + (m - 1) * x.max(axis=0)
            for x in (d.forward, d.backward)
        ]
        bubble: Number = passes[0] + passes[1] - busy
        return bubble
    if not s.splits_backward:
        once = (
            d.forward + d.backward + d.hidden_transfers
        )  # a transfer shows on the way down and back
        bubble = ((w.rank_multiplicity * once).sum(axis=0) - slowest) / s.chunks
        return bubble
    forward, backward, weight = (
        (w.rank_multiplicity * x).sum(axis=0) / w.pipeline
        for x in (d.forward, d.backward, d.weight_grad)
    )
    bubble = closed_forms.bubble(
        s.schedule, w.pipeline, m, s.chunks, forward, backward - weight, weight
    )
    return bubble


def _forward_makespan(w: Workload, forward: Array) -> Number:
    """Seconds of the forward passes of all microbatches alone: the slowest rank's, and the others'
    of one microbatch while the pipeline fills.
    """
    slowest = forward.max(axis=0)
    fill = (w.rank_multiplicity * forward).sum(axis=0) - slowest
    seconds: Number = _longest(w, forward) + fill / w.fixed.chunks
    return seconds


def _bubble_on_shared_cores(bubble: Number, busy: Number, sharing: float) -> Number:
    """What is left of a bubble where `sharing` CPU ranks share a core: while one waits, another
    runs.

    `busy` are the seconds of a rank beside its neighbors; alone it would need `sharing` times
    less.
    """
    return bubble if sharing <= 1 else np.maximum(0.0, (busy + bubble) / sharing - busy)


def simulated_schedule(w: Workload, d: MicrobatchDurations, table: Table) -> Timeline:
    """Compute of one plan's step by `table`, simulated.

    Transfers go in the order in which stages post them, over the plan's backend, where the
    framework's do; else they are taken to arrive as soon as they are sent. What is not hidden of
    them is part of the actions.
    """
    s = w.fixed
    each = float(d.hidden_transfers.sum()) / max(1, 2 * (w.pipeline - 1))
    if not s.framework.model_parallel.ordered_transfers:
        return simulate(table, stage_durations(w, d), each)
    timeline = simulate(
        _executed(table, receives_early(s.schedule)),
        stage_durations(w, d),
        each,
        transport=s.transport,
        pair_groups=s.pair_groups,
    )
    return Timeline(tuple(timeline.compute), timeline.ranks)


def simulated_makespan(w: Workload, d: MicrobatchDurations) -> float:
    """Seconds of all microbatches of one plan, those of a long step from its first ones."""
    s, every = w.fixed, int(w.step_microbatches)
    ranks, turn = (sum(s.replicas), lcm(*s.replicas)) if s.in_turn else (s.pipeline, 1)
    held = max(s.in_flight, default=2 * ranks)

    def makespan(count: int) -> float:
        return simulated_schedule(w, d, named_table(s, count)).makespan

    return closed_forms.long_makespan(makespan, every, MAX_ACTIONS // (2 * s.pipeline), held, turn)


@lru_cache(maxsize=64)
def _executed(table: Table, early: bool) -> Table:
    return executable(table, early=early)


def stage_durations(w: Workload, d: MicrobatchDurations) -> dict[str, list[float]]:
    """Seconds of F, B, I and W of one plan by stage."""
    s = w.fixed
    homes = stage_homes(s.pipeline, s.schedule, len(s.partition), s.table)
    return {kind: by_rank[homes].tolist() for kind, by_rank in action_seconds(w, d).items()}


def action_seconds(w: Workload, d: MicrobatchDurations) -> dict[str, Array]:
    """Seconds of an F, B, I and W by rank, whose time is divided evenly over its stages."""
    by_action = {
        "F": d.forward,
        "B": d.backward,
        "I": d.backward - d.weight_grad,
        "W": d.weight_grad,
    }
    return {kind: by_rank / w.fixed.chunks for kind, by_rank in by_action.items()}


def _exposed_data_comm(
    w: Workload,
    constants: Constants,
    d: MicrobatchDurations,
    every: list[CollectiveCall],
    wires: dict[str, AxisLink],
) -> Array:
    """Exposed gradient reduction, and exposed all-gathers of updated parameters, by rank."""
    reductions = [
        c
        for c in every
        if c.axis == "data" and c.action in ("REDUCE_GRAD", "B") and c.kind != "all_gather"
    ]
    seconds = comm_seconds(reductions, wires, constants, "data")
    buckets = np.maximum(1.0, sum(c.count * (c.group_size > 1) for c in reductions))
    overlap = constants.data_overlap if w.pipeline == 1 else constants.pipeline_overlap
    overlap = 0.0 if w.fixed.framework.data_parallel.reduces_late(w.zero) else overlap
    behind = _passes_behind_other_chunks(w)
    # Interleaved, a chunk's gradients are reduced once its last microbatch's backward has ended,
    # beside the backwards of the chunks that follow, and its parameters gathered before its first
    # forward: what one chunk exchanges is exposed (NeMo, Communication Overlap).
    hidden: Number = 0.0
    last = buckets
    if overlap:
        switched = overlap * (_overlaps_compute(w) if w.zero >= 2 else w.searched.overlap)
        backward = switched * d.backward * (behind or 1.0)
        hidden = reductions_a_step(w) * np.maximum(
            0.0, backward - _backward_gather_seconds(w, constants, every, wires)
        )
        last = w.fixed.chunks if behind else buckets
    gathers = comm_seconds(every, wires, constants, "data", "OPTIMIZER")
    if constants.parameter_overlap:
        ahead = constants.parameter_overlap * w.searched.overlap * d.forward * (behind or 1.0)
        gathers = np.maximum(gathers - ahead, gathers / last)
    return np.asarray(np.maximum(seconds - hidden, seconds / last) + gathers)


def _backward_gather_seconds(
    w: Workload, constants: Constants, every: list[CollectiveCall], wires: dict[str, AxisLink]
) -> Number:
    """Seconds of one backward in which ZeRO-3 gathers weights, over the network that gradients are
    reduced over.
    """
    gathers = [c for c in every if c.kind == "all_gather"]
    return comm_seconds(gathers, wires, constants, "data", "B") / w.microbatches


def _passes_behind_other_chunks(w: Workload) -> float:
    """Passes of a microbatch over all chunks of a rank, between its last chunk's last backward and
    its first chunk's: an interleaved schedule takes as many microbatches as pipeline ranks through
    one chunk before the next (2104.04473, section 2.2).
    """
    return w.pipeline * (w.fixed.chunks - 1) / w.fixed.chunks
