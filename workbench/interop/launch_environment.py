"""The environment of a launch: what ranks need, what of the user's own stays, and what is taken
away.

A launch in a shell or a batch job (`export.py`) and a run (`runs.launch.accelerate_command`) take
it from here. None of it changes what is computed but by rounding; what we set, and what of the
user's own is taken over, is in a run's `command.json`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

ON_ONE_NODE = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # torchrun's agent would share a store with its ranks that listens on all addresses: the first
    # rank makes one.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
"""Environment of a launch whose ranks are all on one node: none of them listens on a network."""

OTHER_LAUNCH = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
)
OTHER_LAUNCH_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "PET_")
"""Variables of another launch, which this process may be part of, and prefixes of such: torchrun's
(PET_ are defaults of its options) and Accelerate's, of which one would make ranks join another
world, or train on CPUs or under FSDP.
"""

USERS_OWN = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES")
USERS_OWN_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_")
"""Variables of the user that go before ours: only they know their network."""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of torch's allocators, now and formerly: where both are set, half of torch reads the one
and half the other, so ours is left out where the user has either.
"""
SINGLE_QUEUE_ARCHITECTURES = ("volta", "turing", "ampere", "ada", "hopper")
"""GPU generations on which one hardware queue keeps kernels in the order of their launches; from
Blackwell on Megatron-LM does not ask for it.
"""
DETERMINISTIC_WORKSPACE = ":4096:8"
"""Eight buffers of 4 MiB a handle and stream, with which cuBLAS repeats its results (its
documentation, "Results reproducibility").
"""
DETERMINISTIC_ALGORITHM = "Ring"
"""NCCL's algorithm whose sums are in one order, where switches (NVLS) may add in any; Megatron-LM's
deterministic mode takes Tree, Ring and CollNet.
"""
RECORDED_CALLS = "2000"
"""Collectives that torch's flight recorder remembers, its own default; before torch 2.13 it is off
by default.
"""
FORMER_NAMES = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
"""What the flight recorder's variables were called before; torch heeds the new name where both are
set, so ours is left out where the user has the former.
"""
LARGEST_ROUNDED_MB = 64
"""Pinned memory is rounded up to a power of two up to this size, MiB: a shard of 5 GiB would take
8.
"""
ROUNDING_SINCE = (2, 13)
"""The first torch that knows the limit; earlier ones refuse to start with it."""


def one_node(plan: Plan) -> bool:
    """Whether all ranks of the plan are on one node."""
    return (plan.cluster.nodes or 1) == 1


def environment(plan: ResolvedPlan, cores: int | None = None) -> dict[str, str]:
    """Environment of `accelerate launch` for a complete `plan`; `cores` of the machine, default
    this one's.

    The ranks of a node share its cores, on GPUs too: torchrun would give each one thread, and an
    offloaded optimizer steps on the host. The profiler that measures memory would fill the logs
    with its own comings and goings. Ranks are started by `python -m`, which without PYTHONSAFEPATH
    would import what lies in the current folder before what is installed.
    """
    ranks = int(plan.cluster.gpus_per_node or plan.world_size)
    threads = {"OMP_NUM_THREADS": str(max(1, (cores or os.cpu_count() or 1) // ranks))}
    quiet = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "KINETO_LOG_LEVEL": "6"}
    quiet |= ON_ONE_NODE if one_node(plan) else {}
    threads["OMP_WAIT_POLICY"] = "passive"  # threads that wait would spin on cores of other ranks
    if plan.gpu.device == "cpu":
        return {"ACCELERATE_USE_CPU": "true", **threads, **quiet}
    return {**threads, **quiet, **(_nccl(plan) if plan.gpu.device == "cuda" else {})}


def _nccl(plan: ResolvedPlan) -> dict[str, str]:
    """What NCCL says of itself, and which kernels go first: an all-reduce that is to overlap with a
    GEMM must reach the GPU before the GEMM fills it. Where a collective times out, every rank tells
    which collectives it entered.
    """
    found = {
        "NCCL_DEBUG": "WARN",
        "TORCH_NCCL_HIGH_PRIORITY": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": RECORDED_CALLS,
    }
    if plan.deterministic_kernels:
        found["CUBLAS_WORKSPACE_CONFIG"] = DETERMINISTIC_WORKSPACE
    if plan.training.deterministic:
        found["NCCL_ALGO"] = DETERMINISTIC_ALGORITHM
    return found | ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if single_queue(plan) else {})


def single_queue(plan: ResolvedPlan) -> bool:
    """Whether kernels go through one hardware queue, by Megatron-LM's rule (`validate_args`).

    Tensor and context parallelism count on a collective being launched before the GEMM beside it;
    ZeRO-3, as FSDP, on several queues, since its all-gathers are not to wait for compute.
    """
    before_blackwell = plan.gpu.architecture.split("-")[0] in SINGLE_QUEUE_ARCHITECTURES
    parallel = plan.sizes["tensor"] > 1 or plan.sizes["context"] > 1
    return before_blackwell and parallel and plan.strategy.data.zero < 3


def allocator_settings(torch_version: str) -> str:
    """PYTORCH_ALLOC_CONF for a release of torch.

    Expandable segments keep ZeRO-3's gathered parameters and MoE's rows, which have many sizes,
    from fragmenting memory. A limit of rounding needs the same limit of caching: torch 2.13 takes
    cached blocks of one power of two to have one size, and would give a request a smaller block.
    """
    settings = ["expandable_segments:True"]
    if tuple(map(int, torch_version.split(".")[:2])) >= ROUNDING_SINCE:
        settings += [
            f"pinned_max_round_threshold_mb:{LARGEST_ROUNDED_MB}",
            f"pinned_max_cached_size_mb:{LARGEST_ROUNDED_MB}",
        ]
    return ",".join(settings)


def allocator_environment(torch_version: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The allocator's settings where the user's `environ` has none; the user's where it has."""
    own = {name: environ[name] for name in ALLOCATOR if environ.get(name)}
    return own or {ALLOCATOR[0]: allocator_settings(torch_version)}


def fixed(plan: Plan) -> set[str]:
    """Our variables that go before the user's: ranks would join another device or network."""
    return {"ACCELERATE_USE_CPU", *(ON_ONE_NODE if one_node(plan) else ())}


def users_own(plan: ResolvedPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that go before ours, or that ranks need to reach each other."""
    on_gpus, ours = plan.gpu.device == "cuda", environment(plan)
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name in ours and value)
        or (on_gpus and (name in USERS_OWN or name.startswith(USERS_OWN_PREFIXES)))
        or name == "GLOO_SOCKET_IFNAME"
        if name not in fixed(plan)
    }


def set_for_ranks(plan: ResolvedPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank's `environ` that a launch sets, or the user in its place."""
    ours = {*environment(plan), *ALLOCATOR}
    set_by_us = {name: environ[name] for name in sorted(ours) if name in environ}
    return set_by_us | users_own(plan, environ)


def of_another_launch(environ: Mapping[str, str]) -> list[str]:
    """The variables of `environ` that belong to a launch which is not this one."""
    return sorted(
        name for name in environ if name in OTHER_LAUNCH or name.startswith(OTHER_LAUNCH_PREFIXES)
    )
