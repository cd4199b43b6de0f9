"""What plans disagree about: fields, and of what has a name the name."""

from typing import Any

import pytest

from workbench.plan.plan_diff import differing
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

OWN = {"layers": 2, "hidden": 16, "heads": 2, "ffn": 32, "vocab": 260}


def plan(
    gpu: str = "a100-sxm-80gb", model: dict[str, Any] | str = "tiny", **changes: Any
) -> ResolvedPlan:
    return Plan.of(
        "tiny", gpu=gpu, gpus=2, strategy="ddp", set={"model": model, **changes}
    ).resolve()


def test_names_stand_for_what_the_catalog_holds_under_them() -> None:
    found = differing([plan(), plan("h100-sxm-80gb", "tiny-gpt"), plan()])
    assert {
        field: told for field, told in found.items() if field.startswith(("model", "cluster"))
    } == {
        "model.name": ["tiny", "tiny-gpt", "tiny"],
        "cluster.fabric.name": ["dgx-a100", "dgx-h100", "dgx-a100"],
        "cluster.gpu.name": ["a100-sxm-80gb", "h100-sxm-80gb", "a100-sxm-80gb"],
    }


@pytest.mark.parametrize("others", [[], [plan()]])
def test_what_differs_under_one_name_is_told(others: list[Any]) -> None:
    found = differing([plan(model=OWN), plan(model=OWN | {"layers": 4}), *others])
    assert found["model.layers"][:2] == [2, 4] and "model.vocab" not in found


def test_a_name_of_a_plan_is_no_field_and_an_absent_value_is_none() -> None:
    assert differing([plan(name="a"), plan(name="b")]) == {}
    assert differing([plan(), plan(**{"finetune.lora": {"rank": 4}})])["finetune.lora.rank"] == [
        None,
        4,
    ]
