"""Seconds of one step, part by part: each rank's durations, the pipeline simulated with them, what is not hidden."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from workbench.plan.schema import Plan
from workbench.planner import traffic
from workbench.planner.collectives import Link, links, seconds
from workbench.planner.compute import Compute, Machine, attention_pass, compute, machine, optimizer_seconds
from workbench.planner.constants import Constants
from workbench.planner.states import held
from workbench.planner.traffic import Call
from workbench.planner.workload import Array, Workload
from workbench.schedules import Timeline, generate, simulate

ACTIONS = 1536
"""Most actions that are simulated; longer steps continue at the pace of the slowest rank."""
HIDDEN_BEHIND_ATTENTION = 0.8
"""Share of attention behind which a ring hides its hops."""
LEAST_EXPOSED = 0.03
"""Share of gathers that nothing hides."""


@dataclass(frozen=True)
class Durations:
    """Seconds of one microbatch by pipeline rank, and how much of it is communication."""

    forward: Array
    backward: Array
    compute: Array
    communication: dict[str, Array]
    """Part of the step (tensor_comm, context_comm, ...) -> seconds of one microbatch."""


@dataclass(frozen=True)
class StepTime:
    """One step. `parts` are of the busiest pipeline rank and add up to `seconds`."""

    seconds: float
    parts: dict[str, float]
    utilisation: float
    """Model FLOPs over what all cards could do in the step."""
    timeline: Timeline | None
    """None where the schedule cannot be simulated or has too many actions."""
    simulated: int
    """Microbatches in the timeline."""
    calls: list[list[Call]]
    """Collectives by pipeline rank."""


def step_time(plan: Plan, w: Workload, constants: Constants) -> StepTime:
    """The time of a complete plan's step."""
    m = machine(plan.card, plan.strategy.precision, constants)
    wires = links(plan, constants)
    calls = [traffic.calls(plan, w, rank) for rank in range(w.pipeline)]
    work = compute(w, m)
    durations = _durations(w, m, work, calls, wires)
    makespan, timeline, simulated = _pipeline(w, durations)
    owned = held(w).total / (w.shard if w.zero >= 1 else 1)
    after = {
        "data_comm": _data_exposed(w, constants, durations, calls, wires),
        "optimizer": float(np.max(optimizer_seconds(w, m, owned))) + _offload(plan, w, constants, owned, makespan),
        "overhead": 1e-3 * (constants.step_fixed_ms + constants.step_doubling_ms * math.log2(plan.world_size)),
    }
    busiest = int(np.argmax(durations.forward + durations.backward))
    parts = {"compute": w.microbatches * float(durations.compute[busiest])}
    parts |= {k: w.microbatches * float(v[busiest]) for k, v in durations.communication.items()}
    parts["bubble"] = max(0.0, makespan - sum(parts.values()))
    parts |= {k: parts.get(k, 0.0) + v for k, v in after.items()}
    total = sum(parts.values())
    flops = float(work.model_flops.sum()) * w.microbatches * w.tensor * w.context * w.data
    return StepTime(total, parts, flops / (total * plan.world_size * m.flops), timeline, simulated, calls)


def _durations(w: Workload, m: Machine, work: Compute, calls: list[list[Call]], wires: dict[str, Link]) -> Durations:
    """Compute, and the communication that a microbatch waits for."""
    c = m.constants
    hidden = {"F": work.forward, "B": work.backward}
    ring = attention_pass(w, m)
    covered = {"F": ring.forward * w.layers, "B": ring.backward * w.layers}
    parts: dict[str, dict[str, Array]] = {}
    for action in ("F", "B"):

        def of(axis: str, action: str = action) -> Array:
            return np.array([traffic.axis_seconds(x, wires, c, axis, action) for x in calls]) / w.microbatches

        gathers = of("data") if w.zero == 3 else np.zeros(w.pipeline)
        parts[action] = {
            "tensor_comm": of("tensor"),
            "context_comm": np.maximum(0.0, of("context") - HIDDEN_BEHIND_ATTENTION * covered[action]),
            "expert_comm": of("expert"),
            "data_comm": np.maximum(gathers - c.gather_overlap * hidden[action], LEAST_EXPOSED * gathers),
            "pipeline_comm": _received(w, wires["pipeline"], c, action),
        }
    both = {name: parts["F"][name] + parts["B"][name] for name in parts["F"]}
    always = ("tensor_comm", "data_comm", "pipeline_comm")
    return Durations(
        forward=np.asarray(work.forward + sum(parts["F"].values())),
        backward=np.asarray(work.backward + sum(parts["B"].values())),
        compute=np.asarray(work.forward + work.backward),
        communication={name: value for name, value in both.items() if name in always or value.any()},
    )


def _received(w: Workload, link: Link, constants: Constants, action: str) -> Array:
    """A rank waits for what it receives: activations before F, gradients before B; every chunk anew."""
    one = seconds("recv", w.stream / w.sequence_parallel, link, constants) if w.pipeline > 1 else 0.0
    receives = 1 - (w.first if action == "F" else w.last)
    return np.asarray(one * (receives + (w.chunks - 1)))


def _pipeline(w: Workload, d: Durations) -> tuple[float, Timeline | None, int]:
    """(makespan, timeline, microbatches in it)."""
    both = d.forward + d.backward
    slowest, warm = float(both.max()), float(both.sum() - both.max())
    closed = w.microbatches * slowest + warm / w.chunks
    if w.schedule == "interleaved":
        return closed, None, 0
    if w.schedule == "gpipe":
        closed = sum(float(x.sum() + (w.microbatches - 1) * x.max()) for x in (d.forward, d.backward))
    microbatches = min(w.microbatches, ACTIONS // (2 * w.pipeline))
    if microbatches < min(w.microbatches, 2 * w.pipeline):
        return closed, None, 0
    table = generate(w.schedule, w.pipeline, microbatches)
    timeline = simulate(table, {"F": d.forward.tolist(), "B": d.backward.tolist()})
    pace = float(d.forward.max() + d.backward.max()) if w.schedule == "gpipe" else slowest
    return timeline.makespan + (w.microbatches - microbatches) * pace, timeline, microbatches


def _data_exposed(
    w: Workload, constants: Constants, d: Durations, calls: list[list[Call]], wires: dict[str, Link]
) -> float:
    """Gradient reduction that nothing hides; under a pipeline it is an action of its own and hides behind nothing."""
    once = ("REDUCE_GRAD", "OPTIMIZER", "B")
    kinds = ("reduce_scatter", "all_reduce", "all_gather")
    worst = 0.0
    for rank, own in enumerate(calls):
        chosen = [c for c in own if c.axis == "data" and c.kind in kinds and c.action in once]
        chosen = [c for c in chosen if not (w.zero == 3 and c.kind == "all_gather")]
        spent = traffic.axis_seconds(chosen, wires, constants, "data")
        behind = constants.data_overlap * float(d.backward[rank]) if w.pipeline == 1 else 0.0
        buckets = max(1.0, sum(c.count for c in chosen))
        worst = max(worst, max(spent - behind, spent / buckets))
    return worst


def _offload(plan: Plan, w: Workload, constants: Constants, owned: Array, compute: float) -> float:
    """Gradients to the host and parameters back, beyond what compute hides (2101.06840)."""
    if w.offload == "none":
        return 0.0
    moved = float(owned.max()) * (w.gradient_element + w.element)
    if w.offload == "parameters":
        moved += 2 * w.microbatches * float(held(w).total.max()) * w.element
    return max(0.0, moved / (plan.card.pcie_gbs * 1e9) - constants.offload_overlap * compute)
