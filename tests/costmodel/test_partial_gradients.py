"""Gradients of which tensor ranks have parts: summed once a step, and paid for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from tests.parallel.operator_strategies import sequence_parallel
from workbench.costmodel.communication.collective_call import CollectiveCall
from workbench.costmodel.communication.collective_volume import exact_collectives, step_collectives
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.rates.constants import Constants
from workbench.costmodel.step_time import step_time
from workbench.plan.schema import Plan
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.operator_plans.planned_workload import planned_workload

SHAPE = {
    "layers": 4,
    "hidden": 256,
    "heads": 8,
    "kv_heads": 8,
    "ffn": 512,
    "vocab": 1024,
    "max_positions": 64,
}
GPT = SHAPE | {"norm": "layernorm", "biases": "all", "positions": "learned", "mlp": "gelu"}
MOE = SHAPE | {"moe": {"experts": 8, "top_k": 2, "ffn": 128, "shared": 1}, "biases": "all"}
TENSOR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sequence": (GPT, {"size": 4, "sequence": True}),
    "2d": (GPT, {"size": [2, 2], "algorithm": "2d"}),
    "2.5d": (GPT, {"size": [2, 2, 2], "algorithm": "2.5d"}),
    "3d": (GPT, {"size": [2, 2, 2], "algorithm": "3d"}),
    "experts": (MOE, {"size": 2}),
    "experts, sequence": (MOE, {"size": 2, "sequence": True}),
}


def planned(shape: dict[str, Any], tensor: dict[str, Any], zero: int = 0, **more: Any) -> Plan:
    size = tensor["size"]
    ranks = int(np.prod(size))
    return Plan.model_validate(
        {
            "model": shape,
            "cluster": {"gpu": "h100-sxm-80gb", "gpus": 4 * ranks},
            "strategy": {"tensor": tensor, "pipeline": {"size": 2}, "data": {"zero": zero}} | more,
            "training": {"sequence_length": 64, "global_batch": 32, "micro_batch": 8},
        }
    )


def sized(plan: Plan) -> tuple[Workload, Constants]:
    measured, constants = with_calibration(plan.resolve())
    return planned_workload(measured), constants


def sums(calls: Iterable[CollectiveCall], stage: int = 0) -> Counter[int]:
    """Group size -> bytes of the sums of gradients over tensor ranks."""
    found: Counter[int] = Counter()
    for call in calls:
        size = np.broadcast_to(call.bytes * call.count, 2)[stage]
        if (call.axis, call.action) == ("tensor", "REDUCE_GRAD") and call.group_size > 1:
            found[int(call.group_size)] += round(float(size))
    return +found


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("name", TENSOR)
def test_they_are_the_buckets_that_a_run_sums(name: str, zero: int, stage: int) -> None:
    w, _ = sized(planned(*TENSOR[name], zero))
    calls = step_collectives(w)
    assert sums(calls, stage) == sums(exact_collectives(w, calls, stage)) != {}


def test_operators_split_by_tokens_sum_what_sequence_parallelism_does() -> None:
    """Learned positions too: no gradient is gathered in backward."""
    manual = planned(GPT, {"size": 4, "sequence": True}, 1)
    split = sequence_parallel(manual.resolve().shape, 4)
    operators = planned(GPT, {"size": 4}, 1, operators=split)
    (w, _), (v, _) = sized(manual), sized(operators)
    assert sums(step_collectives(w)) == sums(step_collectives(v)) != {}


@pytest.mark.parametrize("name", TENSOR)
def test_a_step_waits_for_them(name: str) -> None:
    w, constants = sized(planned(*TENSOR[name]))
    time = step_time(w, constants)
    without = [call for call in time.calls if call.action != "REDUCE_GRAD" or call.axis == "data"]
    shorter = step_time(w, constants, calls=without)
    assert time.seconds - shorter.seconds == pytest.approx(float(time.after["tensor_comm"]))
    assert time.after["tensor_comm"] > shorter.after["tensor_comm"] == 0
