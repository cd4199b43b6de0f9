"""Bytes of model states under a method of fine-tuning: parameters, gradients and optimizer states
of one copy of the model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.costmodel.memory.model_states import model_states
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.operator_plans.planned_workload import planned_workload


class StateBytes(NamedTuple):
    """Bytes of the rank with the most of them, on the device or offloaded. Estimated."""

    parameters: float
    gradients: float
    optimizer: float
    """Moments and master weights."""

    @property
    def total(self) -> float:
        """Of all."""
        return sum(self)


def state_bytes(plan: ResolvedPlan) -> StateBytes:
    """What a rank of a complete plan keeps from step to step."""
    w = planned_workload(with_calibration(plan)[0])
    s = model_states(w, w.param_counts)
    by_rank = [np.ravel(x + w.zeros) for x in (s.parameters, s.gradients, s.optimizer + s.master)]
    most = int(np.argmax(np.sum(by_rank, axis=0)))
    return StateBytes(*(float(x[most]) for x in by_rank))
