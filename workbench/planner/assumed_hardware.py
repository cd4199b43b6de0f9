"""Constants of a plan's GPU that its own description leaves out, and what stands for them."""

from __future__ import annotations

from workbench import data_files
from workbench.costmodel.rates.constants import USUAL_MULTIPROCESSORS
from workbench.plan.resolved_plan import ResolvedPlan

PLANNER_FILE = "data/planner.yaml"


def assumed_hardware(plan: ResolvedPlan) -> str:
    """What a plan does not say of a GPU of its own, and what would help; empty where nothing.

    A GPU of the catalog is complete, and a calibration measures what is missing.

    Args:
        plan: A complete plan.
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
