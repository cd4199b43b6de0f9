"""Calibrations and runs: a run keeps the one it was planned with, and finished runs correct it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.costmodel.test_calibrated import made
from workbench.errors import PlanError
from workbench.machine import calibration_file
from workbench.machine.calibration_file import Calibration, Scale
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.profile import Profile, frame
from workbench.runs.measure import calibrate
from workbench.runs.run import Run


def planned(path: Path, strategy: str = "ddp", gpus: int = 2, **changes: Any) -> Plan:
    return Plan.of("tiny", gpu="local", gpus=gpus, strategy=strategy, set=changes).replace(
        **{"cluster.calibration": str(path)}
    )


def seconds_of(plan: Plan) -> float:
    seconds = estimate(plan).step_seconds
    assert seconds is not None
    return seconds


def scale_of(found: Calibration) -> Scale:
    assert found.scale is not None
    return found.scale


def finished(plan: Plan, name: str, seconds: float | None) -> Any:
    """A run as far as learning looks at it; it trained ten steps of `seconds`."""
    rows = [
        {"rank": 0, "step": i, "seconds": seconds, "source": "measured"}
        for i in range(10 if seconds else 0)
    ]
    profile = Profile(name, "measured", plan.world_size, steps=frame("steps", rows))
    return SimpleNamespace(
        id=name, plan=plan.resolve(), profile=lambda: profile, state=SimpleNamespace(phase="failed")
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    calibration_file.write_calibration(made(), tmp_path / "calibration.yaml")
    return tmp_path / "calibration.yaml"


def test_one_run_is_fitted_and_the_error_before_and_after_is_stored(path: Path) -> None:
    plan = planned(path)
    seconds = 3 * seconds_of(plan)
    found = calibrate.learn(made(), [finished(plan, "a", seconds)])
    calibration_file.write_calibration(found, path)
    assert estimate(plan).step_seconds == pytest.approx(seconds, rel=1e-6)
    scale = scale_of(found)
    assert scale.runs == ["a"] and scale.compute == scale.communication > 2.9
    assert scale.error_before == pytest.approx(2 / 3) and scale.error_after is not None
    assert scale.error_after < 1e-6
    assert found.gemm == made().gemm, "what was measured stays as it was"


def test_runs_of_several_strategies_recover_the_scale_they_were_made_with(path: Path) -> None:
    truth = Scale(compute=1.4, communication=2.5, fixed_ms=30.0)
    calibration_file.write_calibration(made(scale=truth), path)
    plans = [
        planned(path),
        planned(path, "megatron-tp"),
        planned(path, "single", 1),
        planned(path, "gpipe"),
        planned(path, **{"training.global_batch": 32}),
        planned(path, "single", 1, **{"training.global_batch": 1}),
    ]
    runs = [finished(plan, str(i), estimate(plan).step_seconds) for i, plan in enumerate(plans)]
    found = scale_of(calibrate.learn(made(), runs))
    assert found.error_after is not None and found.error_before is not None
    assert found.error_after < 0.02 < found.error_before
    assert found.compute == pytest.approx(truth.compute, rel=0.05)
    assert found.communication == pytest.approx(truth.communication, rel=0.15)


def test_learning_anew_forgets_the_former_scale(path: Path) -> None:
    plan = planned(path)
    seconds = 2 * seconds_of(plan)
    first = calibrate.learn(
        made(scale=Scale(compute=9.0, runs=["old"])), [finished(plan, "new", seconds)]
    )
    assert first.scale == calibrate.learn(made(), [finished(plan, "new", seconds)]).scale


def test_a_run_without_steps_is_refused(path: Path) -> None:
    with pytest.raises(PlanError, match="a has failed without a measured step"):
        calibrate.learn(made(), [finished(planned(path), "a", None)])


def test_a_run_of_another_gpu_is_refused(path: Path) -> None:
    plan = Plan.of("tiny", gpu="h100-sxm-80gb", gpus=2, strategy="ddp")
    with pytest.raises(PlanError, match="measured on local"):
        calibrate.learn(made(), [finished(plan, "a", 1.0)])


def test_a_file_corrects_itself_and_is_measured_only_where_there_is_none(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(path)
    run = finished(plan, "a", 2 * seconds_of(plan))
    monkeypatch.setattr(calibrate, "calibrate", lambda *_: pytest.fail("measured"))
    assert (
        calibrate.calibrate_file(path, runs=[run]).scale
        == calibration_file.read_calibration(path).scale
        is not None
    )
    other = path.with_name("other.yaml")
    assert calibrate.calibrate_file(other, runs=[run]).gemm == made().gemm and other.exists(), (
        "from the file that the plan names"
    )
    monkeypatch.setattr(calibrate, "calibrate", lambda *_: made())
    bare = finished(Plan.of("tiny", gpu="local", gpus=2, strategy="ddp"), "b", 1.0)
    assert scale_of(calibrate.calibrate_file(None, runs=[bare])).runs == ["b"]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e6])
def test_impossible_times_are_refused(seconds: float) -> None:
    with pytest.raises(PlanError, match="legal: 1 to 3600"):
        calibrate.calibrate(seconds)


def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "calibrate", lambda *_: pytest.fail("measured"))
    for path in (tmp_path / "none" / "c.yaml", tmp_path):
        with pytest.raises(PlanError, match="cannot be written"):
            calibrate.calibrate_file(path)


@pytest.fixture
def plan(plan: Plan, path: Path) -> Plan:
    return plan.replace(**{"cluster.calibration": str(path)})


def test_a_run_outlives_the_file_that_it_was_planned_with(
    go: Callable[..., Any], path: Path
) -> None:
    """The machine may be measured anew into the same file, or the file removed."""
    run = go()
    run.wait(30)
    path.unlink()
    again = Run(run.dir)
    assert again.state.phase == "finished"
    assert again.plan.cluster.calibration is not None
    assert calibration_file.read_calibration(again.plan.cluster.calibration) == made()
    assert scale_of(calibrate.learn(made(), [again])).runs == [run.id]
