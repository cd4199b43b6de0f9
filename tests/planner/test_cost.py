"""Cost of so many tokens: arithmetic that adds up, a node's measured power, what is unknown said by
name.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from workbench.errors import PlanError
from workbench.machine import gpu_catalog
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.planner.training_cost import TrainingCost, power_model, training_cost, watts_per_gpu


def priced(
    gpu: str = "h100-sxm-80gb",
    /,
    tokens: float | None = None,
    price: float | None = None,
    **sets: Any,
) -> TrainingCost:
    plan = Plan.of("llama-3-8b", gpu=gpu, gpus=8, strategy="fsdp", set=sets)
    return training_cost(plan.resolve(), estimate(plan), tokens, price)


def test_days_hours_and_money_follow_from_the_step() -> None:
    plan = Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=8, strategy="fsdp")
    profile = estimate(plan)
    found = training_cost(plan.resolve(), profile, tokens=10**12, price=2.5)
    assert profile.step_seconds is not None
    step_tokens = plan.resolve().training.global_batch * plan.resolve().training.sequence_length
    assert found.tokens_per_second == pytest.approx(step_tokens / profile.step_seconds)
    assert found.days == pytest.approx(1e12 / step_tokens * profile.step_seconds / 86400)
    assert found.gpu_hours == pytest.approx(found.days * 24 * 8)
    assert found.dollars == pytest.approx(found.gpu_hours * 2.5)
    assert found.source == "estimated" and found.missing == ()


def test_the_default_is_twenty_tokens_a_parameter() -> None:
    assert priced().tokens == 20 * 8_030_261_248


def test_the_cards_own_price_and_that_of_the_plan() -> None:
    card = gpu_catalog.gpus()["h100-sxm-80gb"].gpu
    assert card.price_per_hour and card.price_source
    found = priced(tokens=10**9)
    assert found.price_per_hour == card.price_per_hour and found.price_source == card.price_source
    own = priced(tokens=10**9, **{"cluster.gpu.price_per_hour": 1.25})
    assert own.dollars == pytest.approx(own.gpu_hours * 1.25)


def test_a_card_without_price_or_power_says_so_and_keeps_the_rest() -> None:
    found = priced("ascend-910b", tokens=10**9)
    assert found.dollars is None and found.kwh is None and found.days > 0
    assert len(found.missing) == 2 and "--price" in found.missing[0] and "watts" in found.missing[1]
    assert priced("ascend-910b", tokens=10**9, price=1.0).dollars is not None


def test_a_price_without_a_source_is_in_no_catalog_entry() -> None:
    for entry in gpu_catalog.gpus().values():
        assert (entry.gpu.price_per_hour is None) == (entry.gpu.price_source == "")


def test_a_node_under_full_load_draws_what_was_measured() -> None:
    """8 H100 under intensive training: 76 % of the 10.2 kW that the node is rated (2506.14551)."""
    watts = watts_per_gpu(gpu_catalog.gpus()["h100-sxm-80gb"].gpu, 1.0)
    assert watts is not None
    assert 8 * watts / power_model().pue == pytest.approx(0.76 * 10200, rel=0.02)


def test_energy_grows_with_the_share_that_computes_and_never_leaves_the_ratings() -> None:
    card = gpu_catalog.gpus()["a100-sxm-80gb"].gpu
    drawn = [watts_per_gpu(card, share) for share in (0.0, 0.5, 1.0, 2.0)]
    assert drawn[0] is not None and 0 < drawn[0] < drawn[1] < drawn[2] == drawn[3]
    found = priced(tokens=10**9)
    assert found.watts is not None and found.kwh == pytest.approx(
        found.gpu_hours * found.watts / 1000
    )


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 0},
        {"tokens": -5},
        {"tokens": float("nan")},
        {"tokens": float("inf")},
        {"price": -1.0},
        {"price": float("nan")},
        {"price": float("inf")},
    ],
)
def test_numbers_that_cannot_be_meant_are_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as error:
        priced(**change)
    assert error.value.problems[0].field.strip("-") in change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"tokens": 1e19},
            "is 1e+19; legal: 1 to 1,000,000,000,000,000,000 (ten thousand times the most tokens",
        ),
        (
            {"price": 1e300},
            "is 1e+300; legal: USD an hour of one GPU, 0 to 1,000,000 (a million USD an hour)",
        ),
    ],
)
def test_the_most_that_is_asked_has_a_reason(change: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as error:
        priced(**change)
    assert says in str(error.value)


def test_a_price_of_nothing_is_a_price() -> None:
    assert priced(tokens=10**9, price=0.0).dollars == 0


def test_it_is_one_json_object() -> None:
    data = json.loads(json.dumps(priced(tokens=10**9).to_json()))
    assert {"tokens_per_second", "days", "gpu_hours", "dollars", "kwh", "source"} <= set(data)
