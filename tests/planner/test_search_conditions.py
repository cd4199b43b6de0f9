"""Conditions of a search: all that is returned meets them, all of it is legal, and what cannot be
meant is refused.
"""

from __future__ import annotations

from typing import Any

import pytest

from workbench.errors import PlanError
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.planner.search import search
from workbench.planner.search.constraints import parse_constraint

PLAN = Plan.model_validate({"model": "gpt2", "cluster": {"gpu": "h100-sxm-80gb", "gpus": 16}})


def field(plan: Plan, path: str) -> Any:
    found: Any = plan.resolve()
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.slow
@pytest.mark.drawn(6)
@pytest.mark.parametrize(
    ("path", "value", "space"),
    [
        ("strategy.data.offload", "parameters", "default"),
        ("strategy.data.shard", 8, "wide"),
        ("strategy.data.reduce", "microbatch", "wide"),
        ("strategy.data.keep_gathered", True, "wide"),
        ("strategy.data.overlap", False, "wide"),
        ("strategy.tensor.sequence", True, "default"),
        ("strategy.pipeline.schedule", "zb-v", "default"),
        ("training.micro_batch", 2, "default"),
        ("strategy.kernels", "fused", "vast"),
        ("strategy.tensor.algorithm", "2d", "vast"),
        ("strategy.tensor.size", [2, 2], "vast"),
    ],
)
def test_all_that_is_returned_meets_the_condition_and_is_legal(
    path: str, value: Any, space: str
) -> None:
    found = search(PLAN, space=space, top=20, where=[f"{path}={str(value).lower()}"])
    assert found.top and found.pareto
    for one in (*found.top, *found.pareto):
        assert field(one.plan, path) == value
    assert estimate(found.top[0].plan).step_seconds == pytest.approx(found.top[0].seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("strategy.context.size=2", "(searched: 1)"),
        ("training.micro_batch=3", "(searched: 1, 2, 4"),
        ("strategy.pipeline.schedule=1f2b", "1f1b, interleaved"),
        ("strategy.tensor.sequence=sometimes", "(searched: false, true)"),
        ("strategy.data.bucket_mib>1e6", "without it"),
    ],
)
def test_a_condition_that_leaves_nothing_is_told_what_is_searched(where: str, says: str) -> None:
    found = search(PLAN, where=[where])
    assert not found.top and found.candidates == 0
    assert f"no plan meets '{where}'" in found.empty and says in found.empty


@pytest.mark.parametrize(
    "where",
    [
        "strategy.data.shard<=8",
        "strategy.pipeline.schedule<3",
        "strategy.tensor.sequence<2",
        "seconds in 1,2",
        "seconds=fast",
        "peak_gib<.nan",
        "peak_gib<.inf",
        "peak_gib<nan",
        "peak_gib<true",
        "ségonds<2",
        "",
        "gpus<=" + "9" * 900,
        "peak_gib<" + "9" * 10_000,
        "gpus in " + "[" * 10_000,
        "a" * 10_000,
    ],
)
def test_a_condition_that_cannot_be_meant_is_refused(where: str) -> None:
    with pytest.raises(PlanError, match="--where"):
        search(PLAN, where=[where])


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ("1,2", [1, 2]),
        ("[1, 2]", [1, 2]),
        ("1,[2,2]", [1, [2, 2]]),
        ("[2,2],[4,4]", [[2, 2], [4, 4]]),
        ("[[2,2]]", [[2, 2]]),
    ],
)
def test_a_condition_lists_numbers_and_grids(written: str, values: list[Any]) -> None:
    assert parse_constraint(f"strategy.tensor.size in {written}").value == values
