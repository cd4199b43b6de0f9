"""Seconds of one step, part by part: what each pipeline rank computes and waits for, the bubble,
what is not hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from workbench.costmodel.communication.collective_cost import Link, links, seconds, spent
from workbench.costmodel.communication.collective_volume import Call, calls
from workbench.costmodel.compute.roofline import (
    Kernels,
    Machine,
    compute,
    kernels,
    machine,
    model_flops,
    optimizer_seconds,
)
from workbench.costmodel.frameworks.stragglers import RARE, chance, stalls, waits
from workbench.costmodel.inputs.config import Array, Number, stage_homes
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.rates.constants import Constants
from workbench.schedules import closed_forms, simulate

HIDDEN_BEHIND_ATTENTION = 0.8
"""Share of attention behind which a ring hides its hops."""
LEAST_EXPOSED = 0.15
"""Share of gathers that nothing hides: while they run, they take multiprocessors and memory
bandwidth from compute.
"""


@dataclass(frozen=True)
class Durations:
    """Seconds of one microbatch by pipeline rank, and how much of it is communication."""

    forward: Array
    backward: Array
    weight: Array
    """Of the backward, what makes the weights' gradients."""
    compute: Array
    communication: dict[str, Array]
    """Part of the step (tensor_comm, context_comm, ...) -> seconds of one microbatch."""


@dataclass(frozen=True)
class StepTime:
    """One step of each candidate: what a microbatch takes, and what the step takes around its
    microbatches.
    """

    seconds: Number
    durations: Durations
    bubble: Number
    after: dict[str, Number]
    """Part of the step -> seconds that follow the last microbatch."""
    calls: list[Call]


def step_time(w: Workload, constants: Constants, layers: Kernels | None = None) -> StepTime:
    """The time of a step; `layers` where the caller has them already."""
    m = machine(w.setting.card, w.setting.precision, constants)
    wires, every = links(w, constants), calls(w)
    k = layers or kernels(w, m)
    d = _durations(w, m, k, every, wires)
    slowest = (d.forward + d.backward).max(axis=0)
    bubble = _on_shared_cores(_bubble(w, d, slowest), w.microbatches * slowest, constants.sharing)
    makespan = w.microbatches * slowest + bubble
    owned = w.held.trained / (w.knobs.shard if w.zero >= 1 else 1)
    after = {
        "data_comm": _data_exposed(w, constants, d, every, wires),
        "optimizer": optimizer_seconds(w, m, owned).max(axis=0),
        "offload": _offload(w, constants, owned, makespan) if w.zero else 0.0,
        "overhead": 1e-3
        * (constants.step_fixed_ms + constants.step_doubling_ms * math.log2(w.setting.world)),
    }
    if constants.stall_ms:
        after["stall"] = waits(w, constants) * stalls(w, constants)
    return StepTime(makespan + _sum(after.values()), d, bubble, after, every)


def bounds(
    w: Workload, constants: Constants, time: StepTime, interval: tuple[float, float]
) -> tuple[float, float]:
    """(low, high) seconds of one plan in 90 of 100 cases; `interval` are those of runs of which it
    is known whether a host stalls, over the estimate.
    """
    low, high = interval
    calm = float(time.seconds) - float(time.after.get("stall", 0.0))
    likely = chance(w.setting, constants) > RARE
    return low * calm, high * (calm + float(waits(w, constants)) if likely else float(time.seconds))


def utilisation(w: Workload, constants: Constants, time: StepTime) -> Number:
    """Model FLOPs over what all cards could do in the step."""
    m = machine(w.setting.card, w.setting.precision, constants)
    flops = model_flops(w) * w.microbatches * w.tensor * w.knobs.context
    return flops / (time.seconds * (w.setting.world * m.flops))


def computing(w: Workload, time: StepTime) -> Number:
    """Seconds of the step in which the pipeline rank that computes longest does."""
    return w.microbatches * time.durations.compute.max(axis=0)


def parts(w: Workload, time: StepTime) -> dict[str, float]:
    """The step of one plan, part by part, on its busiest pipeline rank; they add up to
    `time.seconds`.
    """
    d = time.durations
    busiest = int(np.argmax(d.forward + d.backward))
    result = {"compute": float(w.microbatches * d.compute[busiest])}
    result |= {k: float(w.microbatches * v[busiest]) for k, v in d.communication.items()}
    result["bubble"] = float(time.bubble)
    result |= {
        k: result.get(k, 0.0) + float(v)
        for k, v in time.after.items()
        if k != "offload" or np.any(v)
    }
    return result


def _durations(
    w: Workload, m: Machine, k: Kernels, every: list[Call], wires: dict[str, Link]
) -> Durations:
    """Compute, and the communication that a microbatch waits for."""
    c, work = m.constants, compute(w, m, k)
    hidden = {"F": work.forward, "B": work.backward}
    idle = {"F": work.idle_forward, "B": work.idle_backward}
    covered = {"F": k.attention.forward, "B": k.attention.backward}
    # Behind the parts of a product what moves hides, not its latency; behind a late host all does,
    # but the latency of a network: hosts of several nodes are late each in its own time.
    tensor, far = wires["tensor"], w.tensor * w.knobs.strides["tensor"] > w.setting.node
    moves = {"tensor": Link(tensor.bandwidth / (1 - c.tensor_overlap), tensor.latency * (1 - far))}
    starts = {"tensor": Link(math.inf, tensor.latency * far)}
    waits: dict[str, dict[str, Array]] = {}
    for action in ("F", "B"):

        def of(axis: str, action: str = action, wires: dict[str, Link] = wires) -> Array:
            return np.asarray(w.nothing + spent(every, wires, c, axis, action) / w.microbatches)

        waits[action] = {
            "tensor_comm": np.maximum(0.0, of("tensor", wires=moves) - idle[action])
            + of("tensor", wires=starts),
            "pipeline_comm": _received(w, wires["pipeline"], c, action),
        }
        if w.setting.contexts:
            behind = w.layers * (HIDDEN_BEHIND_ATTENTION * covered[action])
            waits[action]["context_comm"] = np.maximum(0.0, of("context") - behind)
        if w.shape.moe:
            waits[action]["expert_comm"] = (1 - c.expert_overlap) * of("expert")
        if w.zero == 3:
            gathers = of("data")
            behind = c.gather_overlap * _overlaps(w) * hidden[action]
            waits[action]["data_comm"] = np.maximum(gathers - behind, LEAST_EXPOSED * gathers)
    return Durations(
        forward=np.asarray(work.forward + _sum(waits["F"].values())),
        backward=np.asarray(work.backward + _sum(waits["B"].values())),
        weight=work.weight,
        compute=np.asarray(work.forward + work.backward),
        communication={name: waits["F"][name] + waits["B"][name] for name in waits["F"]},
    )


def _overlaps(w: Workload) -> Number:
    """1 where what ZeRO-2 or 3 moves has compute to hide behind: with one buffer in flight it has
    none.
    """
    return w.knobs.overlap * float(w.setting.in_flight > 1)


def _sum(values: Iterable[Number]) -> Number:
    """Those of few elements first, so that few additions see them all."""
    return sum(sorted(values, key=np.size), 0.0)


def _received(w: Workload, link: Link, constants: Constants, action: str) -> Array:
    """A rank waits for what it receives: activations before F, gradients before B; every chunk
    anew.
    """
    if w.pipeline == 1:
        return w.nothing
    stream = w.stream / w.sequence_parallel
    if (
        w.setting.replicas
    ):  # of two stages of unequal replicas, the ranks of the one with fewer move more
        stream = np.maximum(stream, np.roll(stream, 1 if action == "F" else -1))
    one = seconds("recv", stream, w.pipeline, link, constants)
    receives = 1 - (w.first if action == "F" else w.last)
    return np.asarray(one * (receives + (w.setting.chunks - 1)))


def _bubble(w: Workload, d: Durations, slowest: Number) -> Number:
    """What the slowest rank waits in a step while others fill and drain the pipeline, in closed
    form.

    Exact for equal stages (`schedules.closed`). Of unequal ones it is the path through the slowest
    stage where backward is whole, and that of mean stages where it is split.
    """
    if w.pipeline == 1:
        return 0.0
    s, m = w.setting, w.microbatches
    if s.table is not None:
        return simulate(s.table, by_stage(w, d)).makespan - m * slowest
    if s.schedule == "gpipe":
        passes = [
            (w.weight * x).sum(axis=0) + (m - 1) * x.max(axis=0) for x in (d.forward, d.backward)
        ]
        return passes[0] + passes[1] - m * slowest
    if s.schedule in ("1f1b", "interleaved"):
        return ((w.weight * (d.forward + d.backward)).sum(axis=0) - slowest) / s.chunks
    forward, backward, weight = (
        (w.weight * x).sum(axis=0) / w.pipeline for x in (d.forward, d.backward, d.weight)
    )
    return closed_forms.bubble(
        s.schedule, w.pipeline, m, s.chunks, forward, backward - weight, weight
    )


def _on_shared_cores(bubble: Number, busy: Number, sharing: float) -> Number:
    """What is left of a bubble where `sharing` ranks take turns on a core: while one waits, another
    has the core.

    `busy` seconds are those of a rank beside its neighbours; alone it would need so many times
    less.
    """
    return bubble if sharing <= 1 else np.maximum(0.0, (busy + bubble) / sharing - busy)


def by_stage(w: Workload, d: Durations) -> dict[str, list[float]]:
    """Seconds of each action of one plan, by stage: a rank's, shared evenly by the stages that it
    holds.
    """
    s = w.setting
    seconds = {"F": d.forward, "B": d.backward, "I": d.backward - d.weight, "W": d.weight}
    homes = stage_homes(s.pipeline, s.schedule, len(s.partition), s.table)
    return {kind: (by_rank / s.chunks)[homes].tolist() for kind, by_rank in seconds.items()}


def _data_exposed(
    w: Workload, constants: Constants, d: Durations, every: list[Call], wires: dict[str, Link]
) -> Number:
    """Gradient reduction that nothing hides, and gathers of stepped parameters, which nothing
    can.
    """
    chosen = [
        c
        for c in every
        if c.axis == "data" and c.action in ("REDUCE_GRAD", "B") and c.kind != "all_gather"
    ]
    took = spent(chosen, wires, constants, "data")
    buckets = np.maximum(1.0, sum(c.count * (c.group_size > 1) for c in chosen))
    share = constants.data_overlap if w.pipeline == 1 else constants.pipeline_overlap
    share = 0.0 if w.zero == 1 and w.setting.software.late_reduce else share
    behind = (
        share * (_overlaps(w) if w.zero >= 2 else w.knobs.overlap) * d.backward if share else 0.0
    )
    gathers = spent(every, wires, constants, "data", "OPTIMIZER")
    return np.asarray(np.maximum(took - behind, took / buckets) + gathers).max(axis=0)


def _offload(w: Workload, constants: Constants, owned: Array, makespan: Number) -> Number:
    """Gradients to the host and parameters back, beyond what compute hides (2101.06840)."""
    k = w.knobs
    moved = owned.max(axis=0) * (w.gradient_element + w.element) * k.offload_optimizer
    moved = moved + k.offload_parameters * (
        2 * w.microbatches * w.held.total.max(axis=0) * w.element
    )
    took = moved / (w.setting.card.pcie_gbs * 1e9)
    return np.maximum(0.0, took - k.offload_optimizer * constants.offload_overlap * makespan)
