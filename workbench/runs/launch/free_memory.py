"""Memory that is free on this machine now, against the least that a plan's ranks will hold."""

from __future__ import annotations

import psutil

from workbench.errors import Problem
from workbench.machine.attached import Attached
from workbench.machine.nvml_devices import order_is_known, visible_gpus
from workbench.plan.model.parameter_count import parameters
from workbench.plan.optimizer_state import state_bytes
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.units import GIB


def memory_problem(plan: ResolvedPlan, found: Attached) -> Problem | None:
    """Why a complete `plan` cannot even hold its model in what others leave free; None where it
    can.

    Whether the plan fits its GPUs, with activations, takes an estimate.
    """
    least, ranks = least_bytes(plan), plan.world_size
    if found.device == "cpu":
        need, free, where = (
            least * ranks,
            psutil.virtual_memory().available,
            f"of this machine, for {ranks} ranks",
        )
    else:
        need, free, where = least, free_gpu_bytes(ranks), "of the GPU with the least free memory"
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
    shard = plan.most_replicas if data.shard == "all" else int(data.shard)
    whole = state_bytes(plan)
    weight = whole.parameter / (shard if data.zero == 3 else 1)
    gradient = whole.gradient / (shard if data.zero >= 2 else 1)
    optimizer = whole.optimizer / (shard if data.zero else 1)
    on_device = {"none": weight + gradient + optimizer, "optimizer": weight, "parameters": 0.0}
    each = on_device["none" if plan.gpu.device == "cpu" else data.offload]
    split = sizes["tensor"] * sizes["pipeline"] * plan.strategy.expert.size
    return int(parameters(plan.shape).total * each / split)


def free_gpu_bytes(ranks: int) -> int:
    """Least free memory of the first `ranks` GPUs, or of the MIG slice, that a process here would
    see, from NVML; of all of them where CUDA's order is not known.
    """
    gpus = visible_gpus()
    unlike = len({gpu.name for gpu in gpus}) > 1 and not order_is_known()
    return min(gpu.free_bytes for gpu in (gpus if unlike else gpus[:ranks]))
