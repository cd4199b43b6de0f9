"""Trackers get the numbers of the steps, and a missing package is named before anything starts."""

from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from workbench.engine.measure.experiment_trackers import Trackers, flatten_config, require_trackers
from workbench.plan import schema


def plan(trackers: list[str]) -> schema.Plan:
    return schema.Plan.model_validate(
        {
            "model": "tiny",
            "cluster": {"gpu": "local", "gpus": 1},
            "telemetry": {"trackers": trackers},
        }
    )


def test_missing_package_is_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"telemetry\.trackers: no_such_tracker not installed; `pip install no_such",
    ):
        require_trackers(["tensorboard", "no_such_tracker"])
    require_trackers([])


def test_tensorboard_holds_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_dir=str(tmp_path))
    trackers = Trackers(accelerator, plan(["tensorboard"]))
    for step in range(3):
        trackers.log({"step": step, "loss": 3.0 - step, "loss_scale": None, "action": "F0"}, step)
    trackers.close()
    trackers.log({"loss": 9.0}, 3)
    events = EventAccumulator(str(tmp_path / "workbench"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 3.0), (1, 2.0), (2, 1.0)]


def test_without_trackers_nothing_is_asked_of_accelerate() -> None:
    trackers = Trackers(None, plan([]))
    trackers.log({"loss": 1.0}, 0)
    trackers.close()


def test_a_failing_tracker_is_let_go_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_dir=str(tmp_path))
    trackers = Trackers(accelerator, plan(["tensorboard"]))

    def fail(*_: object, **__: Any) -> None:
        raise ConnectionError("away")

    accelerator.log = fail
    trackers.log({"loss": 1.0}, 0)
    trackers.log({"loss": 1.0}, 1)
    assert capsys.readouterr().err.count("gave up after ConnectionError: away") == 1


def test_flat_names_are_dotted() -> None:
    assert dict(flatten_config({"a": {"b": 1, "c": [1, 2]}, "d": None})) == {
        "a.b": 1,
        "a.c": "[1, 2]",
        "d": "None",
    }
