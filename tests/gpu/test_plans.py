"""What the checks would run on a GPU is legal there, as far as a machine without one can tell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.checks import Evidence
from tests.gpu.launched import tiny_plan
from tests.gpu.parts import failure_words, launched_runs, memory, nccl_ranks, step_time
from tests.gpu.ranks import ANY_GPU
from workbench.errors import PlanError
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan
from workbench.planner import estimate


def on_a_gpu(folder: Path) -> Iterator[tuple[str, Plan]]:
    evidence = Evidence(False, 2, folder)
    for name, changes in launched_runs.RUNS.items():
        more = dict(changes)
        yield f"launched: {name}", tiny_plan(evidence, more.pop("model", "tiny"), **more)
    for name in memory.CASES:
        yield f"memory: {name}", memory.small_plan(name, evidence)
    for name in memory.LARGE:
        yield f"memory: {name}", memory.large_plan(name, evidence)
    for kernels in ("eager", "fused"):
        yield f"step time: {kernels}", step_time.plan_of(kernels, evidence, None)
    for name, plan in nccl_ranks.EQUAL.items():
        yield f"ranks: {name}", plan
    yield "out of memory", failure_words.too_large(evidence)


def what_is_wrong(name: str, plan: Plan) -> str:
    full = plan.replace(**{"cluster.gpu": ANY_GPU}).resolve()
    require(full, "run")
    assert full.gpu.device == "cuda"
    if plan.strategy.operators:  # which has no estimate
        return ""
    fits = estimate(full).fits
    return "" if fits is (name != "out of memory") else f"{name}: fits is {fits}"


def test_plans_are_legal_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(*words: Any, **fields: Any) -> Plan:
        return original(*words, **fields | {"gpu": ANY_GPU})

    original, wrong = Plan.of, []
    monkeypatch.setattr(Plan, "of", of)
    for name, plan in on_a_gpu(tmp_path):
        try:
            wrong.append(what_is_wrong(name, plan))
        except PlanError as error:
            wrong.append(f"{name}: {error}")
    assert not list(filter(None, wrong)), "\n".join(wrong)
