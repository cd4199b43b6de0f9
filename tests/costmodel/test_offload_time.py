"""How much of the copies between device and host an estimated step waits for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workbench.costmodel.memory.model_states import owned_params
from workbench.costmodel.offload_time import exposed_offload
from workbench.plan.schema import Plan
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.operator_plans.planned_workload import planned_workload

FOREVER = 1e9
"""Seconds of passes, beside which all gradients have left."""


def exposed(optimizer: float, strategy: str = "zero-offload", **changes: Any) -> float:
    """Seconds that a step of GPT-3 13B waits for copies, of `optimizer` seconds on the host."""
    settings = {"training.global_batch": 1, "strategy.precision": "fp16"} | changes
    plan = Plan.of("gpt3-13b", gpu="v100-sxm2-32gb", gpus=1, strategy=strategy, set=settings)
    full, constants = with_calibration(plan.resolve())
    w = planned_workload(full)
    owned = np.asarray(sum(owned_params(w, w.param_counts)))
    return float(exposed_offload(w, constants, owned, FOREVER, optimizer))


def test_the_hosts_step_hides_all_but_the_last_bucket() -> None:
    upload = exposed(0.0)
    assert upload == pytest.approx(2 * 12.85e9 / 15.75e9, rel=0.05)  # 16 bits over PCIe 3.0
    assert exposed(upload / 2) == pytest.approx(upload / 2, rel=0.01)
    one_bucket = exposed(2 * upload)
    assert 0 < one_bucket < upload / 500
    doubled = exposed(2 * upload, **{"strategy.data.bucket_mib": 50.0})
    assert doubled == pytest.approx(2 * one_bucket, rel=0.01)


def test_a_delayed_update_hides_no_upload() -> None:
    late = {"training.optimizer.delayed_update": True}
    assert exposed(FOREVER, **late) == exposed(0.0)


def test_streamed_parameters_return_to_no_device() -> None:
    assert exposed(0.0, strategy="zero-infinity") == 0
