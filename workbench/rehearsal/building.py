"""Building of a session in a rehearsal: its peak memory is counted, its weights are not drawn."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from workbench.engine.measure.live_memory import UNCOUNTED, LiveBytes
from workbench.engine.measure.step_sampler import host_tensors, persistent_tensors
from workbench.engine.session import Session, initial_drawer
from workbench.models.counter_normal import NormalDrawer, chunk_shape
from workbench.models.host_counts import balanced_counts
from workbench.parallel.mesh import Mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planned_device import rehearsed_device


class ScratchOnly(NormalDrawer):
    """Allocates what drawing a matrix allocates, and draws nothing.

    Under fake tensors the hundred operators of each chunk would take longer than a step.
    """

    draws = False

    def fill_matrix(
        self, into_RC: Tensor, row: int, column: int, key: int, deviation: float
    ) -> None:
        """Allocate the temporaries of the largest chunk, and release them."""
        self.scratch(*chunk_shape(into_RC.shape[0], into_RC.shape[1], self.chunk_numel))


def build_session(
    plan: ResolvedPlan, mesh: Mesh, model: nn.Module | None
) -> tuple[Session, dict[str, int]]:
    """The session on fake tensors, and the peak of its building in bytes by category.

    Args:
        plan: The plan.
        mesh: The rank's place in the mesh.
        model: The module of a plan whose model is Python.
    """
    device = rehearsed_device(plan.gpu.device)
    with LiveBytes(device) as live:
        session = Session.build(
            plan,
            mesh,
            device,
            count_reader=balanced_counts,
            model=model,
            drawer=initial_drawer(plan, ScratchOnly),
        )
        # Before anything is summed, so that the peak too has the categories.
        for category, tensors in persistent_tensors(session).items():
            live.register(tensors, category)
        for tensors in host_tensors(session).values():
            live.register(tensors, UNCOUNTED)
        return session, live.peak


def with_building(
    rows: list[dict[str, Any]], building: dict[str, int], stage: int
) -> list[dict[str, Any]]:
    """Memory rows of the first step, whose peak is the building's where that is larger.

    Args:
        rows: Of the step.
        building: Peak of the building, by category.
        stage: The rank's first stage.
    """
    peak = [row for row in rows if (row["moment"], row["tier"]) == ("peak", "device")]
    if sum(building.values()) <= sum(row["bytes"] for row in peak):
        return rows
    where = {"stage": stage, "tier": "device"}
    maximum = {
        row["category"]: row
        for row in rows
        if (row["moment"], row["tier"]) == ("maximum", "device")
    }
    for category, size in building.items():
        row = maximum.setdefault(category, {**where, "moment": "maximum", "category": category})
        row["bytes"] = max(size, row.get("bytes", 0))
    return [
        *(row for row in rows if row not in peak and row not in maximum.values()),
        *({**where, "moment": "peak", "category": c, "bytes": n} for c, n in building.items()),
        *maximum.values(),
    ]
