"""Sensitivity: what a plan's step and peak would be on twice the hardware, with other kernels, on
eight more cards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from workbench.costmodel.compute.roofline import KERNELS_PER_LAYER
from workbench.errors import PlanError
from workbench.plan.schema import Plan
from workbench.planner.calibrated_plan import on_machine
from workbench.planner.explain.neighbor_plans import Move
from workbench.planner.explain.plan_figures import Change, Effect, Subject

KERNELS = "strategy.kernels"
MORE = 8
FAR = 8
"""Times the unit of cards (a replica) within which a legal number is looked for."""


def sensitivity(subject: Subject) -> list[Effect]:
    """The effects of what can be changed and estimated, in a fixed order."""
    return [
        *_hardware(subject),
        *(e for name, change in _questions(subject) if (e := subject.effect(name, change))),
    ]


def _hardware(subject: Subject) -> Iterator[Effect]:
    here = on_machine(subject.full)[0]
    card, fabric = here.gpu, here.fabric
    doubled: tuple[tuple[str, Change, Change], ...] = (
        ("twice the network between nodes", {}, {"nic_gbs": 2 * fabric.nic_gbs}),
        ("twice the link inside a node", {"link_gbs": 2 * card.link_gbs}, {}),
        ("twice the memory bandwidth", {"bandwidth_gbs": 2 * card.bandwidth_gbs}, {}),
        (
            "twice the FLOP/s",
            {"tflops": {dtype: 2 * rate for dtype, rate in card.tflops.items()}},
            {},
        ),
    )
    yield from (subject.with_hardware(*question) for question in doubled)


def _questions(subject: Subject) -> Iterator[Move]:
    full = subject.full
    yield from _more_cards(subject)
    yield from (
        (f"{kind} kernels", {KERNELS: kind})
        for kind in KERNELS_PER_LAYER
        if kind != full.strategy.kernels
    )
    yield "twice the sequence", {"training.sequence_length": 2 * full.training.sequence_length}
    size = full.training.micro_batch
    if size % 2 == 0:
        yield "half the micro-batch", {"training.micro_batch": size // 2}
    yield "twice the micro-batch", {"training.micro_batch": 2 * size}


def _more_cards(subject: Subject) -> Iterator[Move]:
    """Eight more cards, or the legal number nearest to that; the batch stays, or becomes the
    nearest that is legal.
    """
    full = subject.full
    wanted, unit = full.world_size + MORE, full.world_size // full.sizes["data"]
    counts = [k * unit for k in range(full.world_size // unit + 1, wanted // unit + FAR)]
    for gpus in sorted(counts, key=lambda count: abs(count - wanted)):
        change = _on(subject.plan, full, gpus, gpus // unit)
        if _is_legal(subject, change):
            near = "" if gpus == wanted else ", the nearest legal number to 8"
            yield f"{gpus - full.world_size} more cards{near}", change
            return


def _on(plan: Plan, full: Plan, gpus: int, replicas: int) -> Change:
    share = full.training.micro_batch * replicas
    batch = max(1, math.floor(full.training.global_batch / share + 0.5)) * share
    wiring: Change = {
        f"cluster.{field}": None
        for field in ("nodes", "gpus_per_node")
        if field in plan.cluster.model_fields_set
    }
    return {"cluster.gpus": gpus, **wiring, "training.global_batch": batch}


def _is_legal(subject: Subject, change: Change) -> bool:
    try:
        subject.plan.replace(**{**subject.pins, **change}).resolve()
    except PlanError:
        return False
    return True
