"""Plans on the published layer profiles beside the published plans."""

import pytest

from workbench.planner.unequal_stages.published.comparison import Comparison, compare_published
from workbench.planner.unequal_stages.published.plans import MODELS


@pytest.fixture(scope="module", params=MODELS)
def comparison(request: pytest.FixtureRequest) -> Comparison:
    return compare_published(request.param, whole_sequences=False)


def test_no_planner_is_ahead_of_the_search(comparison: Comparison) -> None:
    by_planner = {plan.name: plan for plan in comparison.planners}
    assert set(by_planner) >= {"search", "DAPPLE, published", "PipeDream, published"}
    best = by_planner.pop("search").speed_up
    assert best is not None and 1 < best <= 16
    assert all(one.speed_up is None or one.speed_up <= best for one in by_planner.values())


def test_the_published_plan_is_found_or_explained(comparison: Comparison) -> None:
    found = comparison.place is not None and comparison.place <= 3
    assert found == (comparison.model in ("BERT-Large", "XLNet-36"))
    assert found == (not comparison.explained)
    if not found:  # each of the two plans, term by term
        for term in ("slowest stage", "slowest transfer", "all-reduce", "step"):
            assert comparison.explained.count(term) == 2
