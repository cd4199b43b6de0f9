"""Compute of a microbatch of a user's traced module: its products by the roofline or as they were
measured, and what its other operators read and write.
"""

from __future__ import annotations

import math

import numpy as np

from workbench.costmodel.compute.engine_traffic.moved_bytes import MovedBytes
from workbench.costmodel.compute.kernel_rates import DeviceRates, PassTimes, gemm_seconds
from workbench.costmodel.compute.memory_bound import counted_seconds
from workbench.costmodel.compute.roofline import MicrobatchCompute, host_ahead
from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.inputs.traced_stages import TracedStages
from workbench.costmodel.operators.stage_pass import StagePass
from workbench.costmodel.rank_passes import rank_passes
from workbench.costmodel.traced.operator_table import PRODUCTS
from workbench.plan.operators.traced.traced_graph import TracedNode

PASSES = 3
"""Products of a backward and a forward, in those of a forward."""


def traced_microbatch_compute(w: Workload, m: DeviceRates) -> MicrobatchCompute:
    """Compute seconds of one microbatch, by pipeline rank."""
    each = [_of_rank(w, m, own) for own in rank_passes(w)]
    seconds, launches = (
        {name: np.array([one[i][name] for one in each]) for name in ("F", "B", "W")} for i in (0, 1)
    )
    if m.constants.measured is not None:
        host = 1e-6 * m.constants.measured.host.operator_us * m.constants.measured.scale.compute
        forward, backward = (seconds[x] + host * launches[x] for x in ("F", "B"))
        return MicrobatchCompute(forward, backward, seconds["W"], w.zeros, w.zeros)
    slow, host = m.constants.compute_slowdown, 1e-6 * m.constants.launch_us
    backward = slow * seconds["B"] + _accumulation_seconds(w, m)
    (forward, first), (backward, second) = (
        host_ahead(gpu, host * count) if m.host_runs_ahead else (gpu + host * count, w.zeros)
        for gpu, count in ((slow * seconds["F"], launches["F"]), (backward, launches["B"]))
    )
    return MicrobatchCompute(forward, backward, slow * seconds["W"], first, second)


def _of_rank(
    w: Workload, m: DeviceRates, stages: tuple[StagePass, ...]
) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds, operators) of a rank's stages in F, in B and, of it, in weight gradients."""
    seconds, count = dict.fromkeys("FBW", 0.0), dict.fromkeys("FBW", 0.0)
    for stage in stages:
        for (action, work), times in stage.work.items():
            one = _priced(w, m, work.kind, work.sizes)
            seconds[action] += times * float(getattr(one, work.direction))
            count[action] += times * (1 + (work.direction == "backward"))
            seconds["W"] += times * float(one.weight_grad) * (work.direction == "backward")
    return seconds, count


def _priced(w: Workload, m: DeviceRates, kind: str, sizes: tuple[float, ...]) -> PassTimes:
    measured = m.constants.measured
    if kind == "linear":
        rows, columns, inner = sizes
        if measured is not None:
            one = measured.operator("linear", "eager", rows, columns, inner)
            return PassTimes(one.forward, one.backward, one.weight)
        weight = gemm_seconds(m, columns, inner, rows, w.element_bytes)
        return PassTimes(
            gemm_seconds(m, rows, columns, inner, w.element_bytes),
            weight + gemm_seconds(m, rows, inner, columns, w.element_bytes),
            weight,
        )
    moved = _moved_bytes(w, kind, sizes)
    if measured is not None:
        return PassTimes(*(measured.stream_seconds(n) if n else 0.0 for n in moved))
    return PassTimes(*counted_seconds(m, MovedBytes(*moved)))


def _moved_bytes(w: Workload, kind: str, sizes: tuple[float, ...]) -> tuple[float, float]:
    """Bytes that an operator moves in forward and in backward."""
    if kind == "moved":
        return sizes[0], sizes[1]
    elements = sizes[0] * w.element_bytes  # of a lookup, or a loss sharded by vocabulary
    table = sizes[1] * w.element_bytes if kind == "lookup" else elements
    return 2 * elements, elements + table


def _accumulation_seconds(w: Workload, m: DeviceRates) -> Number:
    """Seconds in which a microbatch's gradients are added to those before."""
    moved = (2 * w.stored_gradient_bytes + w.element_bytes) * w.param_counts.trained
    return counted_seconds(m, MovedBytes(backward=moved))[1]


def traced_model_flops(w: Workload, traced: TracedStages) -> Number:
    """Model FLOPs of one microbatch of every replica, on one tensor rank: MFU's numerator."""
    own = sum(_multiply_adds(traced, node) for node in traced.factored.graph.nodes)
    return PASSES * 2 * own * w.busy_replicas / w.tensor


def _multiply_adds(traced: TracedStages, node: TracedNode) -> float:
    if node.op not in PRODUCTS:
        return 0.0
    if node.op == "scaled_dot_product_attention":  # of q k^T and of its product with v
        keys = traced.factored.graph.tensors()[node.inputs[1]].shape[-2]
        return 2.0 * math.prod(node.outputs[0].shape) * keys
    return float(math.prod(traced.factored.nodes[node.id].sizes.values()))
