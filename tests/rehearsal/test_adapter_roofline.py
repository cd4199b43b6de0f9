"""The operators that a rehearsal counts of a plan with adapters, summed on the planned GPU, against
the estimate's compute: thin GEMMs, frozen weights without a gradient, weights in 4 bits.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.rehearsal.test_operator_roofline import MORE, QUICK, planned
from workbench.rehearsal.rehearse import rehearse

TOLERANCE = 0.01
ALL: dict[str, Any] = {"rank": 16}
NF4 = {"finetune.quantize": {"group": 64}}
LATE: dict[str, Any] = {"rank": 16, "targets": ["blocks.[1-2].mlp.*"]}
Case = tuple[str, dict[str, Any], dict[str, Any]]

FEW: list[Case] = [("llama, eager", LATE, {}), ("tied, fused, recomputed", ALL, NF4)]
"""Plan of `test_operator_roofline`, adapters, fields of the plan."""
CASES: list[Case] = [
    ("llama, eager", ALL, {}),
    ("sequence parallel, two stages, recomputed", ALL, {}),
    ("llama, eager", {**ALL, "dropout": 0.1}, {}),
    ("layer norm, fused, tensor ranks", {**ALL, "dropout": 0.1}, {}),
    ("mixture, experts split", ALL, NF4),
    ("ring", {"rank": 8, "targets": ["attention.[qv]"]}, {}),
    ("layer norm, fused, tensor ranks", ALL, {}),
    ("mixture, fused, sequence parallel", ALL, {}),
    ("relu, sequence parallel, attention recomputed", ALL, {}),
    ("ZeRO-3, recomputed", {"rank": 16, "targets": ["blocks.1.*"]}, {}),
    ("fp16, four stages, fused", {"rank": 16, "targets": ["blocks.[2-3].*"]}, {}),
]


def check(case: Case) -> None:
    """Every rehearsed rank's operators add up to the estimate of its stage."""
    name, lora, fields = case
    plan = planned(*{**QUICK, **MORE}[name]).replace(**{"finetune.lora": lora, **fields})
    for rank in rehearse(plan, operators=True).notes["operators"]["ranks"]:
        assert abs(rank["difference"]) <= TOLERANCE, rank


@pytest.mark.parametrize("case", FEW, ids=str)
def test_the_sum_over_operators_is_the_estimates_compute(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_so_it_is_on_every_axis(case: Case) -> None:
    check(case)
