"""Step time, part by part: compute, exposed communication, pipeline bubble, optimizer, offload."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from workbench.costmodel.communication.collective_call import REFERENCE, CollectiveCall
from workbench.costmodel.communication.collective_cost import AxisLink, axis_links, comm_seconds
from workbench.costmodel.communication.collective_volume import reductions_a_step, step_collectives
from workbench.costmodel.compute.kernel_rates import device_rates
from workbench.costmodel.compute.measured_layer import (
    measured_layer_times,
    measured_microbatch_compute,
    measured_optimizer_seconds,
)
from workbench.costmodel.compute.roofline import LayerTimes, model_flops
from workbench.costmodel.compute.traced_seconds import traced_model_flops
from workbench.costmodel.inputs.adapted_layers import with_adapters_off
from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.model_states import owned_params
from workbench.costmodel.microbatch_durations import (
    MicrobatchDurations,
    overlaps_compute,
    sum_of_parts,
    timed_microbatch,
)
from workbench.costmodel.offload_time import exposed_offload
from workbench.costmodel.pipeline_bubble import (
    bubble_on_shared_cores,
    forward_makespan,
    longest_passes,
    pipeline_bubble,
)
from workbench.costmodel.rates.constants import Constants


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
    durations = timed_microbatch(w, m, k, calls, links)
    busy = longest_passes(w, durations.passes)
    bubble = bubble_on_shared_cores(
        pipeline_bubble(w, durations, busy), busy, constants.ranks_per_core
    )
    makespan = busy + bubble
    by_rank = after_by_rank(w, constants, durations, calls, links)
    after: dict[str, Number] = {part: seconds.max(axis=0) for part, seconds in by_rank.items()}
    stepping = after["optimizer"]
    if w.fixed.delays_update:  # beside the passes of the next step
        after["optimizer"] = np.maximum(0.0, after["optimizer"] - makespan)
    after["offload"] = exposed_offload(w, constants, _owned(w), makespan, stepping)
    if w.fixed.reference_pass:
        own = [replace(call, action="F") for call in calls if call.action == REFERENCE]
        reference = timed_microbatch(with_adapters_off(w), m, k, own, links)
        after["reference"] = forward_makespan(w, reference.forward)
    after["overhead"] = step_overhead(w.fixed.world_size, constants)
    return StepTime(makespan + sum_of_parts(after.values()), durations, bubble, after, calls)


def after_by_rank(
    w: Workload,
    constants: Constants,
    durations: MicrobatchDurations,
    calls: list[CollectiveCall],
    links: dict[str, AxisLink],
) -> dict[str, Array]:
    """Part of the step -> seconds after the last microbatch, by rank of the workload."""
    m = device_rates(w.fixed.gpu, w.fixed.precision, constants)
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
    return longest_passes(w, time.durations.compute)


def _busiest(w: Workload, d: MicrobatchDurations) -> tuple[int, float]:
    """(place of the rank of one plan that is busiest in a step, its microbatches)."""
    passes = d.passes
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
        switched = overlap * (overlaps_compute(w) if w.zero >= 2 else w.searched.overlap)
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
