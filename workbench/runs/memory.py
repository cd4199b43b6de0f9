"""Memory that is free on this machine now, against the least that a plan's ranks will hold."""

from __future__ import annotations

import os

import psutil

from workbench.plan.attached import Attached
from workbench.plan.errors import Problem
from workbench.plan.parameters import parameters
from workbench.plan.schema import Plan

GIB = 2**30


def memory_problem(plan: Plan, found: Attached) -> Problem | None:
    """Why a complete `plan` cannot even hold its model in what others leave free; None where it can.

    No judgement of whether the plan fits its cards, activations and all: that is the planner's.
    """
    least, ranks = least_bytes(plan), plan.world_size
    if found.device == "cpu":
        need, free, where = least * ranks, psutil.virtual_memory().available, f"of this machine, for {ranks} ranks"
    else:
        need, free, where = least, free_card_bytes(ranks), "of the fullest card"
    if need <= free:
        return None
    message = f"weights, gradients and optimizer take at least {need / GIB:.1f} GiB {where}, and {free / GIB:.1f} GiB"
    return Problem("cluster.gpus", f"{message} are free now; end what else runs there, or split the model further")


def least_bytes(plan: Plan) -> int:
    """Bytes of weights, gradients and optimizer of the largest rank, from below: stages are taken as equal."""
    strategy, sizes = plan.strategy, plan.sizes
    weights = 4 if strategy.precision == "fp32" else 2
    moments = 8 if plan.training.optimizer.name == "adamw" else 4
    master = 0 if strategy.precision == "fp32" else 4
    zero = strategy.data.zero
    each = weights if zero else 2 * weights + moments + master
    shards = sizes["tensor"] * sizes["pipeline"] * (sizes["data"] if zero == 3 else 1)
    return 0 if plan.code else parameters(plan.shape).total * each // shards


def free_card_bytes(ranks: int) -> int:
    """Free memory of the fullest of the first `ranks` cards that a process here would see, from NVML."""
    import pynvml  # only where cards are attached

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        free = [int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles]
    finally:
        pynvml.nvmlShutdown()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    seen = [free[int(name)] for name in named if name.isdigit() and int(name) < len(free)]
    return min((seen or free)[:ranks])
