"""Starting a run resolves its plan once and runs preflight once."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import PlanError
from workbench.plan.schema import Plan
from workbench.runs.launch import checked_launch


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Names of what is called from now on, in order; nothing is launched."""
    found: list[str] = []

    def record(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return function(*args, **kwargs)

        return call

    resolve = record("resolve", Plan.resolver)
    monkeypatch.setattr(Plan, "resolver", staticmethod(resolve))
    monkeypatch.setattr(
        sys.modules["workbench.plan.resolution"], "resolve", record("resolve", resolve)
    )
    for name in ("preflight", "_supervise"):
        function = getattr(checked_launch, name) if name == "preflight" else lambda folder: None
        monkeypatch.setattr(checked_launch, name, record(name, function))
    return found


def test_a_run_is_resolved_once_and_preflight_runs_once(calls: list[Any], tmp_path: Path) -> None:
    plan = Plan.of("tiny", gpus=2, strategy="ddp")
    calls.clear()
    run = checked_launch.run(plan, root=tmp_path)
    assert calls == ["resolve", "preflight", "_supervise"]
    assert run.plan.corpus.sha256, "the plan in the run directory is pinned"


def test_a_run_that_is_refused_writes_nothing(calls: list[Any], tmp_path: Path) -> None:
    plan = Plan.of("llama-3-70b", gpus=1, strategy="single")
    with pytest.raises(PlanError, match="does not fit"):
        checked_launch.run(plan, root=tmp_path / "runs")
    assert calls.count("preflight") == 1 and not (tmp_path / "runs").exists()
