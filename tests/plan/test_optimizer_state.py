"""Bytes per parameter: what ZeRO's paper counts, for every optimizer and dtype that a plan
names.
"""

from typing import Any

import pytest

from workbench.plan.optimizer_state import StateBytes, state_bytes
from workbench.plan.schema import Plan


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, StateBytes(2, 4, 8, 4)),
        ({"strategy.gradient_dtype": "bf16"}, StateBytes(2, 2, 8, 4)),
        ({"strategy.precision": "fp8"}, StateBytes(2, 4, 8, 4)),
        ({"strategy.precision": "fp32"}, StateBytes(4, 4, 8, 0)),
        ({"strategy.precision": "tf32"}, StateBytes(4, 4, 8, 0)),
        ({"training.optimizer.moments": "bf16"}, StateBytes(2, 4, 4, 4)),
        ({"training.optimizer.moments": "int8"}, StateBytes(2, 4, 2, 4)),
        ({"training.optimizer.master": "none"}, StateBytes(2, 4, 8, 0)),
        ({"training.optimizer.name": "sgd"}, StateBytes(2, 4, 4, 4)),
        (
            {"training.optimizer.name": "sgd", "training.optimizer.beta1": 0.0},
            StateBytes(2, 4, 0, 4),
        ),
    ],
)
def test_state_bytes_follow_the_dtypes_of_the_plan(
    changes: dict[str, Any], expected: StateBytes
) -> None:
    plan = Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=1, strategy="ddp")
    plan = plan.replace(**{"training.global_batch": 64, **changes}).resolve()
    found = state_bytes(plan)
    assert found == expected
    assert found.optimizer == expected.moments + expected.master
