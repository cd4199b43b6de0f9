"""What the descriptions of a plan's GPU and hosts leave out, and what stands for it."""

from __future__ import annotations

from workbench import data_files
from workbench.costmodel.rates.constants import USUAL_MULTIPROCESSORS
from workbench.plan.resolved_plan import ResolvedPlan

PLANNER_FILE = "data/planner.yaml"


def assumed_hardware(plan: ResolvedPlan) -> str:
    """What a plan does not say of its hardware, and what would help; empty where nothing.

    Args:
        plan: A complete plan.
    """
    return ". ".join(filter(None, (_of_gpu(plan), _of_host(plan))))


def _of_host(plan: ResolvedPlan) -> str:
    """That nobody knows whether the hosts hold what is offloaded; on CPU ranks `run` looks."""
    s, fabric = plan.strategy, plan.fabric
    offloads = s.data.offload != "none" or s.offload_activations
    if plan.gpu.device == "cpu" or not offloads or plan.host_capacity_bytes is not None:
        return ""
    return (
        f"the memory of a host of {fabric.name} is not known: what is offloaded is taken to fit. "
        "Give cluster.fabric.host_memory_gib"
    )


def _of_gpu(plan: ResolvedPlan) -> str:
    """Of a GPU of the plan's own: one of the catalog is complete, and a calibration measures what
    is missing.
    """
    gpu = plan.gpu
    if gpu.device == "cpu" or plan.cluster.calibration is not None:
        return ""
    known = list(data_files.read_data_file(PLANNER_FILE)["architectures"])
    assumed, give = [], []
    if gpu.architecture not in known:
        said = f"'{gpu.architecture}'" if gpu.architecture else "not given"
        assumed.append(
            f"the generation of {gpu.name} is {said}: GEMMs and attention are taken to reach the "
            "shares of a peak that data/planner.yaml gives GPUs in general"
        )
        give.append(f"cluster.gpu.architecture ({', '.join(known)})")
    if gpu.multiprocessors is None:
        assumed.append(
            f"small GEMMs are taken to fill it as they fill {USUAL_MULTIPROCESSORS} multiprocessors"
        )
        give.append("cluster.gpu.multiprocessors")
    if plan.strategy.precision == "fp8" and gpu.fp8_gemm_layouts is None:
        assumed.append(
            "its fp8 GEMMs are taken to read operands in one order, so that a transposed copy is "
            "kept"
        )
        give.append("cluster.gpu.fp8_gemm_layouts (tn, all)")
    return f"{'; '.join(assumed)}. Give {' and '.join(give)}, or calibrate" if assumed else ""
