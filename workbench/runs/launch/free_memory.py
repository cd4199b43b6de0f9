"""Memory that is free on this machine now, against the least that a plan's ranks will hold."""

from __future__ import annotations

import os

import psutil

from workbench.errors import Problem
from workbench.machine.attached import Attached
from workbench.plan.parameter_count import parameters
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import STORED, Plan

GIB = 2**30


def memory_problem(plan: ResolvedPlan, found: Attached) -> Problem | None:
    """Why a complete `plan` cannot even hold its model in what others leave free; None where it
    can.

    No judgement of whether the plan fits its cards, activations and all: that is the planner's.
    """
    least, ranks = least_bytes(plan), plan.world_size
    if found.device == "cpu":
        need, free, where = (
            least * ranks,
            psutil.virtual_memory().available,
            f"of this machine, for {ranks} ranks",
        )
    else:
        need, free, where = least, free_card_bytes(ranks), "of the fullest card"
    if need <= free:
        return None
    message = (
        f"weights, gradients and optimizer take at least {need / GIB:.1f} GiB {where}, and "
        f"{free / GIB:.1f} GiB"
    )
    return Problem(
        "cluster.gpus",
        f"{message} are free now; end what else runs there, or split the model further",
    )


def least_bytes(plan: ResolvedPlan) -> int:
    """Bytes of weights, gradients and optimizer of the largest rank, from below: stages are taken
    as equal.

    Of a GPU's rank, what the plan keeps in host memory is left out.
    """
    if plan.code:
        return 0
    data, sizes = plan.strategy.data, plan.sizes
    shard = sizes["data"] * sizes["context"] if data.shard == "all" else int(data.shard)
    weight, gradient, optimizer = bytes_each(plan)
    weight /= shard if data.zero == 3 else 1
    gradient /= shard if data.zero >= 2 else 1
    optimizer /= shard if data.zero else 1
    kept = {"none": weight + gradient + optimizer, "optimizer": weight, "parameters": 0.0}
    each = kept["none" if plan.gpu.device == "cpu" else data.offload]
    split = sizes["tensor"] * sizes["pipeline"] * plan.strategy.expert.size
    return int(parameters(plan.shape).total * each / split)


def bytes_each(plan: Plan) -> tuple[float, float, float]:
    """Bytes of a parameter's weight, its gradient, and its moments and master weight, before
    anything is sharded.
    """
    optimizer = plan.training.optimizer
    weight = 4 if STORED.get(plan.strategy.precision, plan.strategy.precision) == "fp32" else 2
    gradient = 4 if plan.strategy.gradient_dtype == "fp32" else weight
    moments = 2 if optimizer.name == "adamw" else int(optimizer.beta1 > 0)
    master = 4 if weight < 4 and optimizer.master == "auto" else 0
    return weight, gradient, moments * {"fp32": 4, "bf16": 2, "int8": 1}[optimizer.moments] + master


def free_card_bytes(ranks: int) -> int:
    """Free memory of the fullest of the first `ranks` cards that a process here would see, from
    NVML.
    """
    import pynvml  # only where cards are attached

    pynvml.nvmlInit()
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        free = [int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles]
    finally:
        pynvml.nvmlShutdown()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    seen = [free[int(name)] for name in named if name.isdigit() and int(name) < len(free)]
    return min((seen or free)[:ranks])
