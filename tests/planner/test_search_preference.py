"""A search for a plan that trains on preference pairs: every micro-batch holds whole pairs."""

import pytest

from workbench.plan.schema import Plan
from workbench.planner.search.search import search


@pytest.mark.parametrize("space", [None, pytest.param("wide", marks=pytest.mark.slow)])
def test_candidates_hold_whole_pairs(space: str | None) -> None:
    task = {"preference": {}, "lora": {}, "global_batch": 64, "sequence_length": 1024}
    plan = Plan.model_validate(
        {
            "model": "llama-3.2-1b",
            "cluster": {"gpu": "h100-sxm-80gb", "gpus": 8},
            "finetune": task,
            "corpus": {"format": "preferences"},
        }
    )
    found = search(plan, space=space, top=50)
    plans = [each.plan.resolve() for each in (*found.top, *found.pareto)]
    assert len(plans) > 50
    assert {plan.training.micro_batch % 2 for plan in plans} == {0}
    assert {plan.strategy.tensor.algorithm for plan in plans} == {"1d"}
