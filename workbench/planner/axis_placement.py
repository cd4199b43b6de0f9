"""Which axis should stand where: orders of the axes ranked by the step they give, each with what
its axes move.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from workbench.costmodel.communication.collective_call import CollectiveCall
from workbench.costmodel.communication.collective_cost import WIRE_FACTOR, axis_links, comm_seconds
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.rates.constants import Constants
from workbench.costmodel.step_time import step_time
from workbench.plan.rank_placement import TrafficReach, axis_reach, axis_strides
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import AXES, Axis, Plan
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.operator_plans.planned_workload import planned_workload


@dataclass(frozen=True)
class AxisTraffic:
    """What one axis moves in a step, on its busiest rank; estimated."""

    axis: Axis
    ranks: int
    bytes: float
    seconds: float
    """In its collectives, hidden or not."""
    reach: TrafficReach

    @property
    def where(self) -> str:
        """How far it goes, in words."""
        return {"node": "inside nodes", "network": "between nodes", "racks": "between racks"}[
            self.reach
        ]

    @property
    def text(self) -> str:
        """In a few words."""
        return (
            f"{self.axis} ({self.ranks}) moves {self.bytes / 1e9:.3g} GB a rank {self.where} in "
            f"{self.seconds:.3g} s"
        )


@dataclass(frozen=True)
class AxisPlacement:
    """One order of the axes, innermost first; estimated."""

    order: tuple[Axis, ...]
    seconds: float
    """Of a step."""
    axes: tuple[AxisTraffic, ...]
    """Axes of several ranks, what moves most first."""

    @property
    def reason(self) -> str:
        """The traffic of each axis and how far it goes, in one sentence."""
        return (
            f"{'; '.join(axis.text for axis in self.axes)} (estimated)"
            if self.axes
            else "one rank moves nothing"
        )


def rank_placements(plan: Plan) -> list[AxisPlacement]:
    """Orders of a plan's axes that differ in where axes of several ranks stand, fastest first;
    equal ones as written.

    Completes the plan; a few milliseconds. Raises `PlanError` as `estimate` does.
    """
    full, constants = with_calibration(plan.resolve())
    w = planned_workload(full)
    return sorted(
        (_evaluate_order(w, constants, order) for order in _distinct_orders(full)),
        key=lambda one: one.seconds,
    )


def placement_of(full: ResolvedPlan) -> AxisPlacement:
    """The order of a complete plan's axes, as it is. Raises `PlanError` as `estimate` does."""
    here, constants = with_calibration(full)
    return _evaluate_order(planned_workload(here), constants, tuple(full.strategy.placement))


def _distinct_orders(full: ResolvedPlan) -> list[tuple[Axis, ...]]:
    """As written, then every other; axes of one rank go outermost, but a pipeline whose
    stages have replicas of their own stays there.
    """
    written, replicas = tuple(full.strategy.placement), full.strategy.pipeline.replicas or []
    long = [axis for axis in written if full.sizes[axis] > 1 or (replicas and axis == "data")]
    short = tuple(axis for axis in AXES if axis not in long)
    orders = [order for order in permutations(long) if not replicas or order[-1] == "pipeline"]
    return [written, *(short + order for order in orders if order != tuple(long))]


def _evaluate_order(w: Workload, constants: Constants, order: tuple[Axis, ...]) -> AxisPlacement:
    mean = w.fixed.world_size / (w.tensor * w.searched.context * w.pipeline)
    sizes = {
        "tensor": w.tensor,
        "context": w.searched.context,
        "data": mean,
        "pipeline": w.pipeline,
    }
    here = replace(w, searched=replace(w.searched, strides=axis_strides(list(order), sizes)))
    time = step_time(here, constants)
    wires, found = axis_links(here, constants), []
    for axis in AXES:
        if sizes[axis] > 1:
            moved = sum((_bytes_sent(call) for call in time.calls if call.axis == axis), 0.0)
            took = comm_seconds(time.calls, wires, constants, axis)
            span = float(here.searched.strides[axis] * sizes[axis])
            reach = axis_reach(span, w.fixed.gpus_per_node, w.fixed.fabric.rack_nodes)
            found.append(
                AxisTraffic(
                    axis,
                    round(float(sizes[axis])),
                    float(np.max(moved)),
                    float(np.max(took)),
                    reach,
                )
            )
    return AxisPlacement(
        order, float(time.seconds), tuple(sorted(found, key=lambda one: -one.bytes))
    )


def _bytes_sent(call: CollectiveCall) -> float:
    """Bytes that a rank sends in a step."""
    if call.kind == "recv":
        return 0.0
    ranks = np.asarray(call.group_size, dtype=float)
    share = 1.0 if call.kind == "send" else WIRE_FACTOR[call.kind] * (ranks - 1) / ranks
    most_bytes: float = np.max(call.count * call.bytes * share)
    return most_bytes
