"""A calibrated plan is one whose GPU, fabric and constants come from a measurement: applied here,
once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import numpy as np

from workbench.costmodel.communication.collective_cost import WIRE_FACTOR
from workbench.costmodel.compute.kernel_launches import KERNELS_PER_LAYER, kernel_launches
from workbench.costmodel.compute.kernel_rates import peak_flops
from workbench.costmodel.frameworks.framework_profile import framework_profile, plan_profile
from workbench.costmodel.inputs.rank_workload import workload
from workbench.costmodel.rates.constants import Constants, constants
from workbench.costmodel.rates.measured_curves import MeasuredCurves
from workbench.costmodel.rates.measured_operators import MeasuredOperators
from workbench.costmodel.step_time import step_time
from workbench.machine.calibration_file import (
    KINDS,
    Calibration,
    Collective,
    Host,
    Probe,
    Scale,
    read_calibration,
)
from workbench.machine.hardware import GPU, Fabric
from workbench.plan.optimizer_state import DTYPE_BYTES
from workbench.plan.probe_plan import TINY, TINY_SEQUENCE, probe_plan
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

TENSORS_PER_ELEMENTWISE = 3
"""Tensors that a typical elementwise operator touches."""
CODE_WIDTH = 1024
"""Width of a model that is code, at whose size memory-bound operators were measured."""
MIN_TRAFFIC = 0.3
"""A step quicker than its products was disturbed less than they were."""
_ALL_REDUCE = "collectives kind all_reduce"
PEAK_SHARE_CONSTANTS = ("gemm_share", "attention_share", "memory_share")
"""Constants that are a share of a peak."""


def calibrated_hardware(plan: ResolvedPlan) -> tuple[GPU, Fabric, dict[str, Any]]:
    """GPU, fabric and changed constants of a complete plan; its own, and none, where it names no
    calibration.

    Constants are named as in `data/planner.yaml`. Raises `PlanError` where the file cannot be used.
    """
    path = plan.cluster.calibration
    return (
        (plan.gpu, plan.fabric, {})
        if path is None
        else apply_calibration(read_calibration(path), plan)
    )


def with_calibration(plan: ResolvedPlan) -> tuple[ResolvedPlan, Constants]:
    """A complete plan with the figures of the machine that its calibration measured, and the
    constants beside them.
    """
    gpu, fabric, changed = calibrated_hardware(plan)
    cluster = plan.cluster.model_copy(update={"gpu": gpu, "fabric": fabric})
    usual = constants(gpu, plan.strategy.kernels, plan.strategy.stack, framework=plan_profile(plan))
    found: dict[str, Any] = {**changed, "measured": measured_operators(plan)}
    return plan.model_copy(update={"cluster": cluster}), replace(usual, **found)


def measured_operators(plan: ResolvedPlan) -> MeasuredOperators | None:
    """Operators that the plan's calibration measured, where they are those that the plan runs: in
    fp32, on CPU ranks, of a framework whose operators are known one by one.
    """
    path, s = plan.cluster.calibration, plan.strategy
    known = framework_profile(s.stack).kernels.counts_operators
    if path is None or (plan.gpu.device, s.precision) != ("cpu", "fp32") or not known:
        return None
    calibration, ranks = read_calibration(path), ranks_per_machine(plan)
    if not calibration.operators:
        return None
    kinds = {c.kind for c in calibration.collectives}
    complete = plan.world_size == ranks and kinds == set(KINDS)
    return MeasuredOperators(calibration, ranks, complete)


def ranks_per_machine(plan: Plan) -> int:
    """Ranks that share one machine."""
    return min(plan.world_size, int(plan.cluster.gpus_per_node or plan.world_size))


def apply_calibration(
    calibration: Calibration, plan: ResolvedPlan
) -> tuple[GPU, Fabric, dict[str, Any]]:
    """GPU, fabric and constants of `plan` on the machine of `calibration`, its scale included."""
    curves = MeasuredCurves(calibration, ranks_per_machine(plan))
    figures = measured_hardware(curves, plan)
    gpu = plan.gpu.model_copy(
        update=_model_fields(figures, GPU) | {"source": _calibration_source(calibration)}
    )
    fabric = plan.fabric.model_copy(update=_model_fields(figures, Fabric))
    found = measured_constants(curves, gpu, plan)
    usual = constants(gpu, plan.strategy.kernels, plan.strategy.stack, framework=plan_profile(plan))
    if traffic := _fitted_traffic(calibration, curves.ranks):
        plain = constants(gpu, "eager").traffic
        found["traffic"] = traffic * usual.traffic / plain
        found["plain_traffic"] = traffic * usual.plain_traffic / plain
    return _apply_scale(calibration.scale or Scale(), gpu, fabric, found, usual)


def _model_fields(figures: Mapping[str, Any], model: type[GPU] | type[Fabric]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name in model.model_fields}


def _calibration_source(calibration: Calibration) -> str:
    machine = calibration.machine
    doubt = f", {calibration.doubt}" if calibration.doubts else ""
    gone = any(each.refused and each.point.startswith(_ALL_REDUCE) for each in calibration.doubts)
    link = ", link of the catalog" if gone and not _all_reduces(calibration) else ""
    return f"measured {machine.date} with torch {machine.versions.get('torch', '?')}{doubt}{link}"


def _all_reduces(calibration: Calibration) -> list[Collective]:
    return [c for c in calibration.collectives if c.kind == "all_reduce"]


def measured_hardware(curves: MeasuredCurves, plan: ResolvedPlan) -> dict[str, Any]:
    """Figures of GPU and fabric that a measurement replaces.

    A CPU rank has no published peak: its peak is the rate of an endless product. A GPU keeps its
    published ones, so that utilisation keeps its meaning, and is measured against them by
    `measured_constants`.
    """
    figures: dict[str, Any] = {}
    if plan.gpu.device == "cpu":
        dtypes = sorted({g.dtype for g in curves.calibration.gemm})
        figures["tflops"] = {dtype: curves.gemm_fit(dtype).rate / 1e12 for dtype in dtypes}
        figures["bandwidth_gbs"] = float(curves.memory_rate(_elementwise_bytes(plan))) / 1e9
    return figures | _fitted_link(curves)


def _elementwise_bytes(plan: ResolvedPlan) -> int:
    """Bytes that an elementwise operator of a layer touches: caches make small ones quick."""
    return (
        TENSORS_PER_ELEMENTWISE
        * plan.training.sequence_length
        * (CODE_WIDTH if plan.code else plan.shape.hidden)
        * DTYPE_BYTES[plan.strategy.precision]
    )


def _fitted_link(curves: MeasuredCurves) -> dict[str, float]:
    """Bandwidth and latency of a ring that takes as long as the measured all-reduce over all ranks
    of the machine.
    """
    if not _all_reduces(curves.calibration) or curves.ranks < 2:
        return {}
    alpha, beta = curves.alpha_beta("all_reduce", curves.ranks)
    hops, share = 2 * (curves.ranks - 1), WIRE_FACTOR["all_reduce"] * (1 - 1 / curves.ranks)
    return {"link_gbs": share / max(beta, 1e-15) / 1e9, "link_latency_us": alpha / hops * 1e6}


def measured_constants(curves: MeasuredCurves, gpu: GPU, plan: ResolvedPlan) -> dict[str, Any]:
    """Constants of `data/planner.yaml` that the measurement replaces, relative to the figures of
    `gpu`.
    """
    precision = plan.strategy.precision
    products, host = curves.gemm_fit(precision), curves.host
    most = peak_flops(gpu, precision)
    found = {
        "gemm_share": products.rate / most,
        "gemm_half_dim": products.half_dim,
        "memory_share": float(curves.memory_rate(_elementwise_bytes(plan)))
        / 1e9
        / gpu.bandwidth_gbs,
        "launch_us": _launch_us(host, plan),
    }
    if (rate := curves.host_optimizer_rate()) is not None:
        found["measured_host_gbs"] = rate / 1e9
    if gpu.device == "cpu":
        found["ranks_per_core"] = max(1.0, curves.ranks / curves.calibration.machine.cores)
    attention = curves.attention_rates(precision, plan.strategy.attention)
    if attention is not None:
        forward, backward = attention
        found |= {"attention_share": forward / most, "attention_backward": 2.5 / backward}
    if _fitted_link(curves):
        found["link_share"] = 1.0
    if plan.world_size == ranks_per_machine(
        plan
    ):  # one machine: all that a step costs beside its layers was seen
        layers = -(-(1 if plan.code else plan.shape.layers) // plan.sizes["pipeline"])
        found |= {
            "step_fixed_ms": (host.step_us + layers * host.layer_step_us) / 1e3,
            "step_doubling_ms": 0.0,
        }
    return found


def _launch_us(host: Host, plan: ResolvedPlan) -> float:
    """Host time of a kernel: a measured layer's over its kernels; for this engine on a GPU, that of
    a layer with the plan's `kernels`.

    A fused layer's few kernels take the host about as long as an eager one's many, so that where it
    was not measured (files of former versions, compiled kernels) an eager layer's time stands for
    it.
    """
    counted = framework_profile(plan.strategy.stack).kernels.counts_operators
    if plan.gpu.device != "cuda" or not counted:
        return host.layer_us / sum(KERNELS_PER_LAYER["eager"])
    kernels, layer_us = plan.strategy.kernels, host.layer_us
    if kernels == "fused" and host.fused_layer_us is not None:
        layer_us = host.fused_layer_us
    return layer_us / _probe_kernels(kernels, host.precision)


@lru_cache
def _probe_kernels(kernels: str, precision: str) -> float:
    """Kernels of a layer and microbatch of the tiny model whose steps are measured on GPUs."""
    sizes: dict[str, Any] = {"layers": 1, "precision": precision, **TINY}
    plan = probe_plan("cuda", TINY_SEQUENCE, 1, kernels=kernels, **sizes)
    return float(sum(kernel_launches(workload(plan), is_moe=False)))


@lru_cache(maxsize=16)
def _fitted_traffic(calibration: Calibration, ranks: int) -> float | None:
    """Traffic of eager memory-bound operators over the textbook's: what products, attention and the
    host leave unexplained of whole steps of small models. None: none was timed.
    """
    near = {probe.ranks for probe in MeasuredCurves(calibration, ranks).probes}
    found = [
        _traffic_of_probe(MeasuredCurves(calibration, at), probe)
        for at in near
        for probe in MeasuredCurves(calibration, at).probes
    ]
    return max(MIN_TRAFFIC, float(np.median(found))) if found else None


def _traffic_of_probe(curves: MeasuredCurves, probe: Probe) -> float:
    sizes = probe.model_dump(exclude={"ranks", "seconds"})
    plan = probe_plan(curves.calibration.machine.device, **sizes)
    gpu = plan.gpu.model_copy(update=_model_fields(measured_hardware(curves, plan), GPU))
    w = workload(plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"gpu": gpu})}))
    found: dict[str, Any] = {**measured_constants(curves, gpu, plan)}
    k = replace(constants(gpu, "eager"), **found)
    one, two = (float(step_time(w, replace(k, traffic=traffic)).seconds) for traffic in (1.0, 2.0))
    return 1.0 + (probe.seconds - one) / (two - one)


def _apply_scale(
    scale: Scale, gpu: GPU, fabric: Fabric, found: dict[str, float], usual: Constants
) -> tuple[GPU, Fabric, dict[str, Any]]:
    """What computes slower by one factor, what communicates by another, every step longer by a
    sum.
    """
    slow, far = scale.compute, scale.communication
    whole = asdict(usual) | found
    changed = found | {name: whole[name] / slow for name in PEAK_SHARE_CONSTANTS}
    changed |= {
        "launch_us": whole["launch_us"] * slow,
        "step_fixed_ms": whole["step_fixed_ms"] + scale.fixed_ms,
    }
    link = {"link_gbs": gpu.link_gbs / far}
    latency = {
        "link_latency_us": fabric.link_latency_us * far,
        "nic_latency_us": fabric.nic_latency_us * far,
    }
    further = latency | {"nic_gbs": fabric.nic_gbs / far}
    return gpu.model_copy(update=link), fabric.model_copy(update=further), changed
