"""Constants of the cost model: by kind of device, GPU generation, kernels and framework profile."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

from workbench import data_files
from workbench.costmodel.compute.kernel_benchmarks import measured_kernels
from workbench.costmodel.frameworks.framework_profile import WORKBENCH, framework_constants
from workbench.machine.hardware import GPU


@dataclass(frozen=True)
class Constants:
    """Reachable shares, latencies and overlaps of hardware and framework.

    Meanings, units and sources are in `data/planner.yaml`.
    """

    gemm_share: float
    gemm_half_dim: float
    gemm_misaligned: float
    narrow_share: float
    grouped_share: float
    attention_share: float
    attention_backward: float
    attention_narrow: float
    unfused_share: float
    memory_share: float
    launch_us: float
    host_us: float
    host_meeting_us: float
    stall_ms: float
    stall_share: float
    host_routing_us: float
    loss_bytes: float
    dropout_bytes: float
    link_share: float
    nic_share: float
    latency_ranks: float
    data_overlap: float
    pipeline_overlap: float
    gather_overlap: float
    tensor_overlap: float
    expert_overlap: float
    param_broadcast_ms: float
    offload_overlap: float
    host_gbs: float
    step_fixed_ms: float
    step_doubling_ms: float
    workspace_mib: float
    context_mib: float
    communicator_mib: float
    fragmentation: float
    compute_slowdown: float
    ranks_per_core: float
    traffic: float
    """Bytes moved by memory-bound operators relative to the textbook count, by the plan's kernels.
    """
    plain_traffic: float
    """The same for seams that fused kernels leave eager."""


def constants(gpu: GPU, kernels: str, stack: str = "workbench") -> Constants:
    """Constants of a GPU with the plan's kernels (eager, compiled, fused) and framework profile.

    The cost of this engine's own kernels is the one measured on the GPU, where there is a
    benchmark of it.
    """
    usual = _constants(gpu.device, gpu.architecture, kernels, stack)
    own = measured_kernels(gpu, kernels) if stack == WORKBENCH and kernels != "eager" else None
    if own is None:
        return usual
    eager = _constants(gpu.device, gpu.architecture, "eager", stack)
    return replace(
        usual,
        traffic=eager.traffic * own.traffic,
        plain_traffic=eager.traffic,
        loss_bytes=eager.loss_bytes * own.loss,
    )


def ideal_constants() -> Constants:
    """Constants of a lossless device: GEMMs, memory and links reach their peaks at any size."""
    reached = {f.name: 1.0 for f in fields(Constants) if f.name.endswith("_share")}
    changed = reached | {
        "attention_narrow": 1.0,
        "attention_backward": 1.0,
        "gemm_half_dim": 0.0,
        "gemm_misaligned": 0.0,
        "stall_share": 0.0,
        "latency_ranks": float("inf"),
    }
    return replace(
        _constants("cuda", "", "eager", WORKBENCH), **changed, traffic=1.0, plain_traffic=1.0
    )


@lru_cache(maxsize=256)
def _constants(device: str, architecture: str, kernels: str, stack: str) -> Constants:
    table = data_files.read_data_file("data/planner.yaml")
    section = table[device]
    section = table[section["like"]] if "like" in section else section
    generation = table["architectures"].get(architecture, {}) if device != "cpu" else {}
    entries = {**section, **generation}
    values = {
        f.name: float(entries[f.name]["value"])
        for f in fields(Constants)
        if "traffic" not in f.name
    }
    values["traffic"] = float(table["kernels"][kernels]["value"])
    changed = dict(framework_constants(stack))
    for share in ("traffic", "attention_share", "narrow_share", "gemm_share"):
        values[share] *= changed.pop(f"{share}_factor", 1.0)
    values["plain_traffic"] = values["traffic"]
    return Constants(**(values | changed))
