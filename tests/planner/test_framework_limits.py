"""What a framework cannot do: searches never propose it, estimates and explanations say it, and
nothing that was published is ruled out.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from workbench.costmodel.frameworks.framework_profile import framework_table
from workbench.lab.panel.explanation_html import reasons_html
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.planner.explain import explain
from workbench.planner.fitting.fit_rows import clean_rows, published_rows
from workbench.planner.framework_limits import broken_limits, framework_limits
from workbench.planner.search import search
from workbench.planner.search.cells import search_cells
from workbench.planner.search.search_space import candidate_plan, search_space


def of(stack: str, /, **changes: Any) -> Plan:
    plan = Plan.model_validate(
        {"model": "llama-2-13b", "cluster": {"gpu": "a100-sxm-80gb", "gpus": 32}}
    )
    return plan.replace(**{"strategy.stack": stack, "training.global_batch": 128, **changes})


PIPELINE = {"strategy.pipeline.size": 4}
ZERO_BUBBLE = {**PIPELINE, "strategy.pipeline.schedule": "zb-h1"}


@pytest.mark.parametrize("stack", sorted(framework_table()))
def test_every_limit_names_its_document(stack: str) -> None:
    for limit in framework_limits(stack):
        assert limit.what and limit.when and len(limit.source) > 20


@pytest.mark.parametrize(
    ("stack", "changes", "words"),
    [
        ("megatron", ZERO_BUBBLE, "no schedule but 1F1B and interleaved 1F1B"),
        ("megatron-2021", ZERO_BUBBLE, "no schedule but 1F1B and interleaved 1F1B"),
        ("nemo", ZERO_BUBBLE, "Megatron-core pipeline_parallel/schedules.py"),
        ("megatron-2021", {"strategy.data.zero": 1}, "ZeRO"),
        ("deepspeed-3d", {**PIPELINE, "strategy.data.zero": 2}, "ZeRO-2 or ZeRO-3 under pipelines"),
        ("colossalai", {**PIPELINE, "strategy.data.zero": 3}, "ZeRO-2 or ZeRO-3 under pipelines"),
        ("megatron", {**PIPELINE, "strategy.data.zero": 2}, "ZeRO-2 or ZeRO-3 under pipelines"),
        ("nemo", {**PIPELINE, "strategy.data.zero": 3}, "ZeRO-2 or ZeRO-3 under pipelines"),
        ("fsdp", PIPELINE, "no pipeline parallelism"),
        ("megatron", {"strategy.tensor.algorithm": "2d", "strategy.tensor.size": [2, 2]}, "grids"),
        ("llmq", {"strategy.tensor.size": 2}, "no tensor parallelism"),
        ("nanotron", {"strategy.data.zero": 3}, "ZeRO-3 is on the roadmap"),
        (
            "torchtitan",
            {"strategy.tensor.size": 2, "strategy.tensor.sequence": False},
            "without sequence parallelism",
        ),
    ],
)
def test_a_plan_beyond_its_framework_is_told(
    stack: str, changes: dict[str, Any], words: str
) -> None:
    plan = of(stack, **changes)
    told = estimate(plan).notes["cannot"]
    assert words in told and told.startswith(f"{stack} has no ")
    found = explain(plan)
    assert (
        told == "; ".join(found.reasons.cannot) == "; ".join(found.to_json()["reasons"]["cannot"])
    )
    assert words in repr(found) and words in found._repr_html_()
    assert words in reasons_html(plan, plan.resolve(), estimate(plan))
    mine = plan.replace(**{"strategy.stack": "workbench"})
    assert "cannot" not in estimate(mine).notes and not explain(mine).reasons.cannot


def marked(stack: str) -> Any:
    """`make test` searches what three have, and `make test-slow` what all the others have."""
    quick = stack in ("deepspeed-3d", "megatron", "torchtitan")
    return pytest.param(stack, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize(
    "stack", [marked(name) for name in sorted(framework_table()) if framework_limits(name)]
)
def test_no_candidate_is_beyond_its_framework_and_none_that_it_can_do_is_lost(stack: str) -> None:
    space = search_space(of(stack), "wide")
    free = replace(search_space(of("workbench"), "wide"), tile_factor=space.tile_factor)
    assert space.tile_factor == (1,)  # tiles are this engine's; no plan of another may have them
    seen: set[str] = set()
    for cell in search_cells(space):
        for split in range(len(cell.values["split"])):
            choice = cell.choice(split)
            seen.add(json.dumps(choice, default=str))
            if split % 7 == 0:
                assert not broken_limits(candidate_plan(space, choice).resolve())
    lost = 0
    for cell in search_cells(free):
        for split in range(0, len(cell.values["split"]), 5):
            choice = cell.choice(split)
            if json.dumps(choice, default=str) not in seen:
                assert broken_limits(candidate_plan(space, choice).resolve())
                lost += 1
    assert lost


def test_nothing_that_was_published_is_ruled_out() -> None:
    wrong = [
        (row.planned.row.label, words)
        for row in clean_rows(published_rows())
        for words in broken_limits(row.planned.plan)
    ]
    assert not wrong


def test_explained_neighbors_stay_within_the_framework() -> None:
    plan = of("megatron", **PIPELINE)
    names = [effect.name for effect in explain(plan).neighbours]
    assert "schedule 1f1b → interleaved" in names
    assert not any("zb" in name or "gpipe" in name for name in names)


def test_an_empty_search_says_what_the_framework_cannot() -> None:
    found = search(of("megatron-2021"), where=["strategy.data.zero>=2"])
    assert not found.top
    assert "megatron-2021 has no sharding over data-parallel ranks (ZeRO)" in found.empty
