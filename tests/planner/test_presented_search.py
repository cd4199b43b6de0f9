"""A search for people: the simplest of what is as fast, twins once, other kernels named."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest

import workbench as wb
from workbench.planner.explain import sensitivity
from workbench.planner.search import SearchResult, search
from workbench.planner.search.results.result_tables import candidate_cells, search_text

PLANS: dict[str, Callable[[], wb.Plan]] = {
    "8b": lambda: wb.Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=64, strategy="zero-3"),
    "xl": lambda: wb.Plan.of("gpt2-xl", gpu="v100-sxm2-32gb", gpus=8, strategy="ddp"),
}


@lru_cache(maxsize=8)
def shown(name: str, objective: str, top: int = 10) -> SearchResult:
    return wb.search(PLANS[name](), objective, top=top)


@lru_cache(maxsize=8)
def ranked(name: str, objective: str) -> SearchResult:
    return search(PLANS[name](), objective, top=20)


def machinery(plan: wb.Plan) -> tuple[int, int]:
    s = plan.strategy
    kinds = ("none", "optimizer", "parameters")
    axes = sum(int(n) > 1 for n in (s.tensor.ranks, s.context.size, s.pipeline.size))
    return kinds.index(s.data.offload), s.data.zero + axes


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("objective", ["time", "cost", "gpus"])
def test_within_the_interval_of_the_best_the_simplest_is_first(name: str, objective: str) -> None:
    best, found = ranked(name, objective).top[0], shown(name, objective)
    assert best.interval is not None
    reach = best.interval[1] / best.seconds
    near = [one for one in found.top if one.score <= reach * best.score]
    if objective == "gpus":
        near = [one for one in found.top if one.plan.world_size == best.plan.world_size]
    order = [machinery(one.plan) for one in near]
    assert order == sorted(order) and list(found.top[: len(near)]) == near
    if found.top[0].plan != best.plan:
        assert "the simplest is first" in search_text(found)


def test_how_many_are_asked_for_does_not_change_the_first() -> None:
    first = shown("8b", "time").top[0].plan
    assert all(shown("8b", "time", top).top[0].plan == first for top in (1, 3))
    assert len(shown("8b", "time", 3).top) == 3


def test_twins_are_one_row_that_names_the_other() -> None:
    found = shown("8b", "time").top
    figures = [(one.seconds, one.peak_bytes) for one in found]
    assert len(set(figures)) == len(figures)
    folded = next(one for one in found if one.twins)
    assert folded.plan.strategy.data.zero == 1 and folded.twins == ("zero 2",)
    assert candidate_cells(folded)[-1].endswith(" (same: zero 2)")
    assert folded.to_json()["same_figures"] == ["zero 2"]


def test_kernels_that_were_not_tried_are_said_with_what_explain_says_of_them() -> None:
    found = shown("8b", "cost")
    effects: list[Any] = [e for e in sensitivity(found.top[0].plan) if "kernels" in e.name]
    best = max(effects, key=lambda effect: effect.speed)
    line = next(note for note in found.notes if note.startswith("kernels are as written"))
    assert best.name in line and f"{best.after.seconds:.2f} s" in line and "--space vast" in line
    fused = PLANS["8b"]().replace(**{"strategy.kernels": best.changes["strategy.kernels"]})
    assert not any("were not tried" in note for note in wb.search(fused, top=1).notes)
