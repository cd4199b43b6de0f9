"""Sensitivity: what a plan's step and peak would be on twice the hardware, with other kernels, on
eight more GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from workbench.errors import PlanError
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.strategy.kernel_rules import OWN_KERNELS
from workbench.plan.schema import Plan
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.explain.neighbor_plans import NamedChange
from workbench.planner.explain.plan_figures import ChangeEffect, ExplainedPlan
from workbench.planner.plan_changes import Change

KERNELS_FIELD = "strategy.kernels"
EXTRA_GPUS = 8
MAX_REPLICA_MULTIPLE = 8
"""Times the unit of GPUs (a replica) within which a legal number is looked for."""


def sensitivity(subject: ExplainedPlan) -> list[ChangeEffect]:
    """The effects of what can be changed and estimated, in a fixed order."""
    return [
        *_hardware_effects(subject),
        *(e for name, change in _plan_changes(subject) if (e := subject.effect(name, change))),
    ]


def _hardware_effects(subject: ExplainedPlan) -> Iterator[ChangeEffect]:
    here = with_calibration(subject.resolved)[0]
    gpu, fabric = here.gpu, here.fabric
    doubled: tuple[tuple[str, Change, Change], ...] = (
        ("twice the network between nodes", {}, {"nic_gbs": 2 * fabric.nic_gbs}),
        ("twice the link inside a node", {"link_gbs": 2 * gpu.link_gbs}, {}),
        ("twice the memory bandwidth", {"bandwidth_gbs": 2 * gpu.bandwidth_gbs}, {}),
        (
            "twice the FLOP/s",
            {"tflops": {dtype: 2 * rate for dtype, rate in gpu.tflops.items()}},
            {},
        ),
    )
    yield from (subject.with_hardware(*question) for question in doubled)


def _plan_changes(subject: ExplainedPlan) -> Iterator[NamedChange]:
    full = subject.resolved
    yield from _more_gpus(subject)
    yield from _other_kernels(full)
    yield "twice the sequence", {"training.sequence_length": 2 * full.training.sequence_length}
    size = full.training.micro_batch
    if size % 2 == 0:
        yield "half the micro-batch", {"training.micro_batch": size // 2}
    yield "twice the micro-batch", {"training.micro_batch": 2 * size}


def _other_kernels(full: ResolvedPlan) -> Iterator[NamedChange]:
    for kind in OWN_KERNELS:
        if kind != full.strategy.kernels:
            yield f"{kind} kernels", {KERNELS_FIELD: kind}


def kernel_effects(subject: ExplainedPlan) -> list[ChangeEffect]:
    """The effects of other kernels alone."""
    named = _other_kernels(subject.resolved)
    return [e for name, change in named if (e := subject.effect(name, change))]


def _more_gpus(subject: ExplainedPlan) -> Iterator[NamedChange]:
    """Eight more GPUs, or the legal number nearest to that; the batch stays, or becomes the
    nearest that is legal.
    """
    full = subject.resolved
    wanted, unit = full.world_size + EXTRA_GPUS, full.world_size // full.sizes["data"]
    counts = [
        k * unit for k in range(full.world_size // unit + 1, wanted // unit + MAX_REPLICA_MULTIPLE)
    ]
    for gpus in sorted(counts, key=lambda count: abs(count - wanted)):
        change = _on_gpus(subject.plan, full, gpus, gpus // unit)
        if _is_legal(subject, change):
            near = "" if gpus == wanted else ", the nearest legal number to 8"
            yield f"{gpus - full.world_size} more GPUs{near}", change
            return


def _on_gpus(plan: Plan, full: Plan, gpus: int, replicas: int) -> Change:
    share = full.training.micro_batch * replicas
    batch = max(1, math.floor(full.training.global_batch / share + 0.5)) * share
    wiring: Change = {
        f"cluster.{field}": None
        for field in ("nodes", "gpus_per_node")
        if field in plan.cluster.model_fields_set
    }
    return {"cluster.gpus": gpus, **wiring, "training.global_batch": batch}


def _is_legal(subject: ExplainedPlan, change: Change) -> bool:
    try:
        subject.plan.replace(**{**subject.pinned_fields, **change}).resolve()
    except PlanError:
        return False
    return True
