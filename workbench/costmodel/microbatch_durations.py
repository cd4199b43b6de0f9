"""Seconds of one microbatch on each rank: compute, and the communication that it exposes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from workbench.costmodel.communication.collective_call import CollectiveCall
from workbench.costmodel.communication.collective_cost import (
    AlikeCalls,
    AxisLink,
    alike_calls,
    alike_seconds,
    axis_links,
    collective_seconds,
    comm_seconds,
)
from workbench.costmodel.communication.collective_volume import step_collectives
from workbench.costmodel.compute.kernel_rates import DeviceRates, device_rates
from workbench.costmodel.compute.measured_layer import (
    measured_layer_times,
    measured_microbatch_compute,
)
from workbench.costmodel.compute.roofline import LayerTimes, MicrobatchCompute
from workbench.costmodel.inputs.config import Array, FixedConfig, Number
from workbench.costmodel.inputs.layer_gemms import column_parallel_share
from workbench.costmodel.inputs.operator_strategies import group_name
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.rates.constants import Constants
from workbench.schedules import receives_early

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
    exposed: dict[str, dict[str, Array]]
    """Action (F, B) -> part of the step (tensor_comm, context_comm, ...) -> exposed seconds."""
    hidden_transfers: Array
    """Seconds in which a microbatch is received at stage boundaries beside the rank's compute."""

    @cached_property
    def passes(self) -> Array:
        """Seconds of a forward and a backward."""
        return np.asarray(self.forward + self.backward)

    @property
    def communication(self) -> dict[str, Array]:
        """Part of the step -> exposed seconds of one microbatch."""
        forward, backward = self.exposed["F"], self.exposed["B"]
        return {name: forward[name] + backward[name] for name in forward}


def microbatch_durations(
    w: Workload, constants: Constants, calls: list[CollectiveCall]
) -> MicrobatchDurations:
    """Seconds of one microbatch on each rank of `w.places`, given the collectives of a step."""
    m = device_rates(w.fixed.gpu, w.fixed.precision, constants)
    return timed_microbatch(w, m, measured_layer_times(w, m), calls, axis_links(w, constants))


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


def timed_microbatch(
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
            gathers, behind = of("data"), ahead * overlaps_compute(w)
            exposed[action]["data_comm"] = np.maximum(gathers - behind, MIN_EXPOSED_SHARE * gathers)
    return MicrobatchDurations(
        forward=np.asarray(work.forward + sum_of_parts(exposed["F"].values())),
        backward=np.asarray(work.backward + sum_of_parts(exposed["B"].values())),
        weight_grad=work.weight_grad,
        compute=np.asarray(work.forward + work.backward),
        idle=np.asarray(work.idle_forward + work.idle_backward),
        exposed=exposed,
        hidden_transfers=np.asarray(transfers),
    )


def hides_transfers(s: FixedConfig) -> bool:
    """Whether transfers between stages run beside compute: one of each direction beside a forward
    or a backward, where receives are posted early, and no core of a CPU has to copy them.
    """
    return s.transport == "nccl" and receives_early(s.schedule, s.transport)


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


def overlaps_compute(w: Workload) -> Number:
    """1 where ZeRO-2 and 3 collectives overlap compute; with a single buffer in flight they do
    not.
    """
    return w.searched.overlap * float(w.fixed.num_zero_in_flight > 1)


def sum_of_parts(values: Iterable[Number]) -> Number:
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
