"""The operators that a rehearsal counted, timed on the planned GPU, beside the estimate's
compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from workbench.costmodel.compute.kernel_rates import device_rates
from workbench.costmodel.compute.operator_roofline import (
    Operator,
    OperatorTime,
    compute_seconds,
    host_wait_seconds,
    operator_times,
)
from workbench.costmodel.rates.constants import Constants
from workbench.costmodel.step_time import compute_seconds_by_rank
from workbench.errors import PlanError
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.operator_plans.planned_workload import planned_workload


def operator_report(plan: ResolvedPlan, counted: Mapping[int, Counter[Operator]]) -> dict[str, Any]:
    """What `notes["operators"]` of a rehearsal holds.

    Args:
        plan: The plan.
        counted: Rank -> operators of a step with their counts.

    Returns:
        `rows`: operators by rank and shape, the longest first; `ranks`: of each rank the seconds of
        its operators and the compute that `estimate` says, where it knows the model; `peak`: FLOP/s
        and bytes/s that kernels reach on the GPU. Seconds are estimated, shapes rehearsed.
    """
    full, constants = with_calibration(plan)
    m = device_rates(full.gpu, full.strategy.precision, constants)
    estimated = _estimated_compute(full, constants, list(counted))
    rows: list[dict[str, Any]] = []
    ranks: list[dict[str, Any]] = []
    for rank, operators in counted.items():
        times = operator_times(operators.items(), rank, m, full.gpu, full.strategy.precision)
        rows += _rows(times)
        summary = {
            "rank": rank,
            "compute_seconds": compute_seconds(times, m),
            "waits_seconds": host_wait_seconds(times, m),
            "optimizer_seconds": sum(
                one.seconds for one in times if one.operator.phase == "optimizer"
            ),
        }
        if estimated is not None:
            own = estimated[rank]
            summary["estimated_compute_seconds"] = own
            summary["difference"] = own / summary["compute_seconds"] - 1
        ranks.append(summary)
    reached = {"flops": m.flops_16bit * m.constants.gemm_share, "bytes": m.bandwidth}
    return {"gpu": full.gpu.name, "reached": reached, "ranks": ranks, "rows": rows}


def _rows(times: list[OperatorTime]) -> list[dict[str, Any]]:
    total = sum(one.seconds for one in times)
    return [one.row() | {"share": one.seconds / total} for one in times]


def _estimated_compute(
    plan: ResolvedPlan, constants: Constants, ranks: list[int]
) -> dict[int, float] | None:
    """Compute seconds of a step of `ranks`; None where the planner does not cover the plan, such as
    a model that is code.
    """
    try:
        w = planned_workload(plan, ranks)
    except PlanError:
        return None
    return dict(zip(ranks, compute_seconds_by_rank(w, constants)))
