"""Constants of the cost model: by kind of device, GPU generation, kernels and framework profile."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from workbench import data_files
from workbench.costmodel.compute.kernel_benchmarks import measured_kernels
from workbench.costmodel.frameworks.framework_profile import (
    DEFAULT_FRAMEWORK,
    FrameworkProfile,
    framework_profile,
    plan_profile,
    stated_constants,
)
from workbench.costmodel.rates.fitted_constants import FittedConstants, published_fit
from workbench.costmodel.rates.measured_operators import MeasuredOperators
from workbench.machine.hardware import GPU
from workbench.plan.resolved_plan import ResolvedPlan

USUAL_MULTIPROCESSORS = 128
"""Of a GPU that does not say how many it has."""


@dataclass(frozen=True)
class Constants:
    """Reachable shares, latencies and overlaps of hardware and framework.

    Meanings, units and sources are in `data/planner.yaml`.
    """

    gemm_share: float
    gemm_half_dim: float
    gemm_misaligned: float
    narrow_share: float
    mxfp8_rate: float
    nvfp4_rate: float
    attention_share: float
    attention_half_length: float
    attention_backward: float
    attention_narrow: float
    attention_balanced_dim: float
    unfused_share: float
    memory_share: float
    launch_us: float
    graph_kernel_us: float
    loss_bytes: float
    dropout_bytes: float
    link_share: float
    nic_share: float
    nic_in_step: float
    """Rate of collectives between nodes in a step over what a benchmark of them reaches."""
    latency_ranks: float
    data_overlap: float
    pipeline_overlap: float
    parameter_overlap: float
    gather_overlap: float
    tensor_overlap: float
    backward_overlap: float
    boundary_overlap: float
    expert_overlap: float
    offload_overlap: float
    host_gbs: float
    host_share: float
    host_socket_gbs: float
    disk_gbs: float
    step_fixed_ms: float
    step_doubling_ms: float
    workspace_mib: float
    context_mib: float
    communicator_mib: float
    fragmentation: float
    compute_slowdown: float
    """Seconds of compute over what its parts say: the framework's fitted multiplier."""
    ranks_per_core: float
    traffic: float
    """Bytes that memory-bound operators move over those counted of `counted_kernels`."""
    plain_traffic: float
    """The same for seams that fused kernels leave eager."""
    counted_kernels: str
    """Kernels (eager, compiled, fused, or this engine's own fused ones) whose bytes are counted."""
    measured: MeasuredOperators | None = None
    """Operators of a CPU rank as a calibration measured them, which count instead of rates."""
    measured_host_gbs: float | None = None
    """Host memory bandwidth of the optimizer's step as a calibration measured it, GB/s, instead of
    `host_gbs`, `host_share` and `host_socket_gbs`.
    """


def plan_constants(plan: ResolvedPlan, fitted: FittedConstants | None = None) -> Constants:
    """Constants of a plan's GPU, kernels and framework profile with the recipes that it has of the
    plan's model.
    """
    s = plan.strategy
    return constants(plan.gpu, s.kernels, s.stack, fitted, plan_profile(plan))


def constants(
    gpu: GPU,
    kernels: str,
    stack: str = DEFAULT_FRAMEWORK,
    fitted: FittedConstants | None = None,
    framework: FrameworkProfile | None = None,
) -> Constants:
    """Constants of a GPU with the plan's kernels (eager, compiled, fused) and framework profile.

    `fitted` replaces the published fit of `data/fitted.json`; `framework` is the profile `stack`
    with recipes of a model.

    The cost of kernels that this project benchmarks is the one measured on the GPU, where there is
    a benchmark of it.
    """
    fit = published_fit() if fitted is None else fitted
    profile = framework or framework_profile(stack, gpu.name)
    known = gpu.device, gpu.architecture
    usual = _of_gpu(gpu, _constants(*known, kernels, stack, fit, profile))
    fused = profile.kernels.runs_fused_seams(kernels)
    own = measured_kernels(gpu, kernels) if fused else None
    if own is None:
        return replace(usual, counted_kernels="own") if fused and kernels == "fused" else usual
    eager = _constants(*known, "eager", stack, fit, profile)
    return replace(
        usual,
        traffic=eager.traffic * own.traffic,
        plain_traffic=eager.traffic,
        counted_kernels="eager",
        loss_bytes=eager.loss_bytes * own.loss,
    )


def _of_gpu(gpu: GPU, usual: Constants) -> Constants:
    """Constants of one GPU among its generation: those that its multiprocessors decide."""
    if gpu.device == "cpu":
        return usual
    peak = gpu.tflops.get("bf16", gpu.tflops.get("fp16", max(gpu.tflops.values())))
    each = peak / (gpu.multiprocessors or USUAL_MULTIPROCESSORS)
    return replace(usual, gemm_half_dim=usual.gemm_half_dim * each)


def ideal_constants() -> Constants:
    """Constants of a lossless device: GEMMs, memory and links reach their peaks at any size."""
    framework = framework_profile(DEFAULT_FRAMEWORK)
    usual = _constants("cuda", "", "fused", DEFAULT_FRAMEWORK, FittedConstants(), framework)
    reached = {f.name: 1.0 for f in fields(Constants) if f.name.endswith("_share")}
    changed: dict[str, Any] = reached | {
        "attention_narrow": 1.0,
        "attention_balanced_dim": 0.0,
        "attention_backward": 1.0,
        "gemm_half_dim": 0.0,
        "gemm_misaligned": 0.0,
        "attention_half_length": 0.0,
        "latency_ranks": float("inf"),
    }
    return replace(usual, **changed, traffic=1.0, plain_traffic=1.0)


@lru_cache(maxsize=1024)
def _constants(
    device: str,
    architecture: str,
    kernels: str,
    stack: str,
    fitted: FittedConstants,
    framework: FrameworkProfile,
) -> Constants:
    table = data_files.read_data_file("data/planner.yaml")
    section = table[device]
    section = table[section["like"]] if "like" in section else section
    generation = table["architectures"].get(architecture, {}) if device != "cpu" else {}
    own = {name: float(entry["value"]) for name, entry in {**section, **generation}.items()}
    values = own | _behavior_constants(own, framework) | dict(stated_constants(stack))
    kernel = table["attention_kernels"].get(framework.kernels.attention, {}).get(architecture)
    if kernel is not None:
        values["attention_share"] = float(kernel["value"])
    values["traffic"] = values["nic_in_step"] = 1.0
    values["compute_slowdown"] = fitted.of_framework(stack)
    if device != "cpu":
        _fit_hardware(values, fitted)
    values["plain_traffic"] = values["traffic"]
    numbers: dict[str, Any] = {
        f.name: values[f.name] for f in fields(Constants) if f.name in values
    }
    return Constants(**numbers, counted_kernels=kernels)


def _behavior_constants(own: dict[str, float], f: FrameworkProfile) -> dict[str, float]:
    """What the hardware makes of a framework's switches."""
    share = own["overlap_share"]
    return {
        "data_overlap": share * f.data_parallel.overlap_reduction,
        "pipeline_overlap": share * f.data_parallel.overlap_pipeline_reduction,
        "parameter_overlap": share * f.data_parallel.overlap_parameters,
        "gather_overlap": share * f.data_parallel.overlap_gather,
        "expert_overlap": share * f.experts.overlap_dispatch,
        "boundary_overlap": share * f.model_parallel.overlap_sends,
        "backward_overlap": share * f.model_parallel.overlap_backward,
        "tensor_overlap": own["tensor_overlap_share"] * f.model_parallel.overlap_tensor,
        "offload_overlap": max(
            own["offload_overlap_share"], share * f.data_parallel.overlap_offload
        ),
        "launch_us": own["launch_cpp_us" if f.kernels.host == "cpp" else "launch_us"],
        "loss_bytes": own["pass_bytes"] * f.loss.passes,
        "narrow_share": own["narrow_share"] * own["rowwise_share"]
        if f.kernels.fp8_scaling == "rowwise"
        else own["narrow_share"],
    }


def _fit_hardware(values: dict[str, float], fitted: FittedConstants) -> None:
    """Multiply what was fitted over all sites onto the constants of a GPU."""
    rate = fitted.in_step()
    for share in ("gemm_share", "narrow_share", "unfused_share"):
        values[share] *= rate
    values["attention_share"] *= rate
    values["traffic"] *= fitted.hardware("traffic")
    values["launch_us"] *= fitted.hardware("launch")
    values["nic_in_step"] = fitted.hardware("nic")
