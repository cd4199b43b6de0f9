"""The plan of a search's space that takes the least memory; no time is computed."""

from __future__ import annotations

import numpy as np

from workbench.plan.schema import Plan
from workbench.planner.search.cell_evaluation import CellEvaluator
from workbench.planner.search.cells import search_cells
from workbench.planner.search.search_space import candidate_plan, search_space


def least_memory_plan(plan: Plan) -> Plan | None:
    """The strategy on a plan's GPUs whose largest rank needs the least GPU memory, offloading no
    more than the hosts hold; None where no combination of axes divides GPUs and batch.

    Args:
        plan: Its model, GPUs, batch and precision count.

    Raises:
        PlanError: The plan is illegal, or its model has no shape.
    """
    space = search_space(plan)
    evaluator, least, found = CellEvaluator.of_memory(space), np.inf, None
    for cell in search_cells(space):
        held = evaluator.memory(cell, cell.grid())
        peaks = np.where(held.legal & held.hosted, held.peak, np.inf)
        if peaks.min() < least:
            least = float(peaks.min())
            at = int(np.argmin(np.broadcast_to(peaks, held.shape)))
            found = cell, at
    return candidate_plan(space, found[0].choice(found[1])) if found else None
