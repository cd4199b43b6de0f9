"""Constants of the planner, from `data/planner.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from workbench.plan import catalog


@dataclass(frozen=True)
class Constants:
    """What the planner takes a device type to be; meanings and sources stand in `data/planner.yaml`."""

    gemm_share: float
    gemm_half_dim: float
    attention_share: float
    attention_backward: float
    memory_share: float
    launch_us: float
    link_share: float
    nic_share: float
    latency_ranks: float
    data_overlap: float
    gather_overlap: float
    offload_overlap: float
    step_fixed_ms: float
    step_doubling_ms: float
    workspace_mib: float
    context_mib: float
    fragmentation: float
    traffic: float
    """Traffic of memory-bound operators relative to the textbook count, by the plan's kernels."""


@lru_cache(maxsize=16)
def constants(device: str, kernels: str) -> Constants:
    """The constants of a device type (cuda, npu, cpu) with the plan's kernels (eager, compiled, fused)."""
    table = catalog.read("data/planner.yaml")
    section = table[device]
    section = table[section["like"]] if "like" in section else section
    values = {f.name: float(section[f.name]["value"]) for f in fields(Constants) if f.name != "traffic"}
    return Constants(**values, traffic=float(table["kernels"][kernels]["value"]))
