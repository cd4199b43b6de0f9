"""Memory that is free on this machine now, against the least that a plan's ranks will hold."""

from __future__ import annotations

import psutil

from workbench.errors import Problem
from workbench.machine.attached import Attached, host_memory
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
    ranks, least, on_host = plan.world_size, least_bytes(plan), least_host_bytes(plan)
    free_host = _free_host_bytes()
    if found.device == "cpu":
        where = f"of this machine, for {ranks} ranks"
        return _problem("cluster.gpus", (least + on_host) * ranks, free_host, where)
    where = f"of the host, for {ranks} ranks that offload {plan.strategy.data.offload}"
    gpu = "of the GPU with the least free memory"
    return _problem("cluster.gpus", least, free_gpu_bytes(ranks), gpu) or _problem(
        "strategy.data.offload", on_host * ranks, free_host, where
    )


def _free_host_bytes() -> int:
    return min(psutil.virtual_memory().available, host_memory())


def _problem(field: str, need: int, free: int, where: str) -> Problem | None:
    if need <= free:
        return None
    return Problem(
        field,
        f"weights, gradients and optimizer take at least {need / GIB:.1f} GiB {where}, and "
        f"{free / GIB:.1f} GiB are free now; end what else runs there, or split the model further",
    )


def least_bytes(plan: ResolvedPlan) -> int:
    """Bytes of weights, gradients and optimizer on the device of the largest rank, from below:
    stages are taken as equal.
    """
    weight, gradient, optimizer = _shards(plan)
    data = plan.strategy.data
    stays = data.zero < 2 or data.reduce == "step"  # gradients leave the device else
    on_device = {
        "none": weight + gradient + optimizer,
        "optimizer": weight + gradient * stays,
        "parameters": gradient * stays,
    }
    return int(_parameters(plan) * on_device[data.offload])


def least_host_bytes(plan: ResolvedPlan) -> int:
    """The same in host memory, of what the plan offloads."""
    data, whole = plan.strategy.data, state_bytes(plan)
    if data.offload == "none":
        return 0
    shard = _shard_ranks(plan)
    copied = data.offload == "parameters" or not whole.master
    each = (whole.optimizer + whole.gradient + whole.parameter * copied) / shard
    return int(_parameters(plan) * each)


def _shards(plan: ResolvedPlan) -> tuple[float, float, float]:
    """Bytes of a rank's (weight, gradient, optimizer state) per parameter of its stage."""
    data, shard, whole = plan.strategy.data, _shard_ranks(plan), state_bytes(plan)
    return (
        whole.parameter / (shard if data.zero == 3 else 1),
        whole.gradient / (shard if plan.shards_gradients else 1),
        whole.optimizer / (shard if data.zero else 1),
    )


def _shard_ranks(plan: ResolvedPlan) -> int:
    shard = plan.strategy.data.shard
    return plan.most_replicas if shard == "all" else int(shard)


def _parameters(plan: ResolvedPlan) -> float:
    """Parameters of a rank's share of the model; 0 of a user's module."""
    if plan.code:
        return 0.0
    sizes = plan.sizes
    split = sizes["tensor"] * sizes["pipeline"] * plan.strategy.expert.size
    return parameters(plan.shape).total / split


def free_gpu_bytes(ranks: int) -> int:
    """Least free memory of the first `ranks` GPUs, or of the MIG slice, that a process here would
    see, from NVML; of all of them where CUDA's order is not known.
    """
    gpus = visible_gpus()
    unlike = len({gpu.name for gpu in gpus}) > 1 and not order_is_known()
    return min(gpu.free_bytes for gpu in (gpus if unlike else gpus[:ranks]))
