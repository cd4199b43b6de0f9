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


CODE = """
from torch import nn
import torch

class Wide(nn.Module):
    def __init__(self, width, looks=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(260, width), nn.Linear(width, 260)
        self.deep = nn.Linear(width, width)
        self.looks = looks

    def forward(self, tokens):
        x = self.embed(tokens)
        if self.looks and x.sum() > 0:  # no trace knows
            x = x + 1
        return self.head(self.deep(x))
"""
"""A user's model, as large as its plan says."""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """Plans of that model, on two CPU ranks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "users_wide.py").write_text(CODE)

    def plan(**arguments: Any) -> Plan:
        model = {"python": "users_wide:Wide", "vocab": 260, "args": arguments}
        return Plan.of("tiny", gpus=2, strategy="ddp", set={"model": model})

    return plan


def test_code_that_by_its_estimate_does_not_fit_is_refused(
    calls: list[Any], users: Callable[..., Plan], tmp_path: Path
) -> None:
    """It is never built: a width of 2^18 is a matrix of 256 GiB."""
    with pytest.raises(PlanError, match=r"does not fit: the estimate needs .*--force"):
        checked_launch.run(users(width=2**18), root=tmp_path / "runs", allow_code=True)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("looks", [False, True])
def test_code_that_fits_or_has_no_estimate_runs(
    calls: list[Any], users: Callable[..., Plan], tmp_path: Path, looks: bool
) -> None:
    checked_launch.run(users(width=8, looks=looks), root=tmp_path / "runs", allow_code=True)
    assert calls[-1] == "_supervise"
