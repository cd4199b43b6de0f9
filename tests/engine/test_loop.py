"""The training loop at the edges: sampling every step or never, one step, checkpoints every step,
odd resumptions.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from workbench.checkpoint import checkpoint_format
from workbench.checkpoint.resume_point import finished_checkpoints
from workbench.engine.export.export_weights import export_checkpoint
from workbench.engine.worker_lifecycle import train
from workbench.models.counter_normal import NormalDrawer
from workbench.plan.schema import Plan
from workbench.runs import Reader

Records = list[dict[str, Any]]


def trained(folder: Path, text: Path, model: str = "tiny", **changes: Any) -> tuple[int, Records]:
    """Exit code and records of one rank that trains in a forked process, its run directory being
    `folder`.
    """
    written = {
        "corpus.source": str(text),
        "training.sequence_length": 16,
        "training.global_batch": 2,
        "training.steps": 3,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    plan = Plan.of(model, gpu="local", gpus=1, strategy="single", set=written)
    folder.mkdir(exist_ok=True)
    (folder / "plan.yaml").write_text(plan.pin().to_yaml())
    process = multiprocessing.get_context("fork").Process(
        target=_child, args=(folder / "plan.yaml",)
    )
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode, Reader(folder).poll()


def _child(path: Path) -> None:
    raise SystemExit(train(path))


def steps(records: Records, kind: str) -> list[int]:
    return [record["step"] for record in records if record["kind"] == kind]


def refusal(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "errors" / "rank00000.json").read_text()))


@pytest.mark.parametrize(
    "every, sampled, timed",
    [(1, [0, 1, 2, 4], [3]), (3, [0, 1, 3], [2, 4]), (0, [0, 1], [2]), (100, [0, 1], [2])],
)
def test_memory_and_the_timeline_are_sampled_on_different_steps(
    tmp_path: Path, text: Path, every: int, sampled: list[int], timed: list[int]
) -> None:
    code, records = trained(
        tmp_path / "run", text, training__steps=5, telemetry__memory_every=every
    )
    assert code == 0
    assert (steps(records, "memory"), steps(records, "timeline")) == (sampled, timed)
    assert sorted(steps(records, "collectives")) == sorted(sampled + timed)
    assert steps(records, "step") == [0, 1, 2, 3, 4] and steps(records, "bye") == [5]
    peaks = [
        row["bytes"]
        for record in records
        if record["kind"] == "memory"
        for row in record["rows"]
        if (row["category"], row["moment"]) == ("allocated", "peak")
    ]
    assert peaks == pytest.approx([peaks[0]] * len(sampled), rel=0.02)


def test_memory_of_ranks_whose_device_has_an_index_is_counted(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate gives a launched CPU rank `cpu:0`; tensors are on `cpu`."""
    monkeypatch.setattr(Accelerator, "device", torch.device("cpu", 0))
    code, records = trained(tmp_path / "run", text)
    (rows, _) = (record["rows"] for record in records if record["kind"] == "memory")
    assert code == 0
    assert sum(row["bytes"] for row in rows if row["category"] == "parameters") > 0


def test_one_step(tmp_path: Path, text: Path) -> None:
    code, records = trained(tmp_path / "run", text, training__steps=1, checkpoint__every=7)
    assert code == 0
    assert steps(records, "step") == steps(records, "memory") == [0] and steps(records, "bye") == [
        1
    ]
    assert steps(records, "checkpoint") == [1]


def test_fine_tuning_leaves_what_it_trained(tmp_path: Path, text: Path) -> None:
    changes = {"finetune__lora__rank": 2, "checkpoint__every": 0}
    code, records = trained(tmp_path / "run", text, **changes)
    assert (code, steps(records, "checkpoint")) == (0, [3])
    (checkpoint,) = finished_checkpoints(tmp_path / "run" / "checkpoints")
    again = {**changes, "checkpoint__load": str(checkpoint), "finetune__steps": 5}
    code, records = trained(tmp_path / "again", text, **again)
    assert (code, steps(records, "step"), steps(records, "checkpoint")) == (0, [3, 4], [5])


def test_errors_of_fine_tuning_name_its_section(tmp_path: Path, text: Path) -> None:
    changes = {"finetune__lora__rank": 2, "finetune__sequence_length": 10**6}
    folder = tmp_path / "run"
    assert trained(folder, text, **changes)[0] == 1
    assert "finetune.sequence_length: 1000000 needs" in refusal(folder)["message"]


def test_a_checkpoint_every_step_of_which_one_is_kept(tmp_path: Path, text: Path) -> None:
    code, records = trained(tmp_path / "run", text, checkpoint__every=1, checkpoint__keep=1)
    assert (code, steps(records, "checkpoint")) == (0, [1, 2, 3])
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]


def test_evaluation_every_step(tmp_path: Path, text: Path) -> None:
    code, records = trained(tmp_path / "run", text, training__evaluation__every=1)
    assert (code, steps(records, "evaluation")) == (0, [1, 2, 3])
    assert steps(records, "memory") == [0, 1]


def test_held_out_text_that_is_too_short_is_refused_before_the_first_step(
    tmp_path: Path, text: Path
) -> None:
    changes = {"training__evaluation__every": 2, "corpus__holdout": 0.0005}
    code, records = trained(tmp_path / "run", text, **changes)
    assert (code, steps(records, "step")) == (1, [])
    assert "the held-out text has" in refusal(tmp_path / "run")["message"]


def test_a_second_launch_in_the_same_folder_reports_only_itself(tmp_path: Path, text: Path) -> None:
    assert trained(tmp_path / "run", text, checkpoint__load="nowhere")[0] == 1
    code, records = trained(tmp_path / "run", text)
    assert (code, steps(records, "step")) == (0, [0, 1, 2])
    assert not (tmp_path / "run" / "errors" / "rank00000.json").exists()
    code, records = trained(tmp_path / "run", text, training__steps=1)
    assert (code, steps(records, "step"), len([r for r in records if r["kind"] == "hello"])) == (
        0,
        [0],
        1,
    )


@pytest.fixture
def saved(tmp_path: Path, text: Path) -> Path:
    code, _ = trained(tmp_path / "first", text, checkpoint__every=3)
    assert code == 0
    return tmp_path / "first" / "checkpoints" / "step-00000003"


def test_a_run_that_is_already_done_ends_at_once(tmp_path: Path, text: Path, saved: Path) -> None:
    code, records = trained(
        tmp_path / "again", text, checkpoint__load=str(saved), checkpoint__every=1
    )
    assert (code, steps(records, "step"), steps(records, "bye")) == (0, [], [3])
    assert not (tmp_path / "again" / "errors" / "rank00000.json").exists()


def test_nothing_is_drawn_that_a_checkpoint_fills(
    tmp_path: Path, text: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on resuming nor from imported weights; a run without them does draw."""
    export_checkpoint(saved, tmp_path / "weights")

    def refuse(*_: Any) -> None:
        raise RuntimeError("drawn")

    monkeypatch.setattr(NormalDrawer, "fill_matrix", refuse)
    code, records = trained(
        tmp_path / "resumed", text, checkpoint__load=str(saved), training__steps=5
    )
    assert code == 0 and steps(records, "step") == [3, 4]
    loaded = {"checkpoint__load": str(tmp_path / "weights")}
    code, records = trained(tmp_path / "imported", text, **loaded)
    assert code == 0 and steps(records, "step") == [0, 1, 2]
    assert trained(tmp_path / "fresh", text)[0] == 1
    assert "drawn" in refusal(tmp_path / "fresh")["message"]


def test_more_steps_go_on_where_it_ended(tmp_path: Path, text: Path, saved: Path) -> None:
    code, records = trained(
        tmp_path / "again", text, checkpoint__load=str(saved), training__steps=5
    )
    assert (code, steps(records, "step"), steps(records, "memory")) == (0, [3, 4], [3, 4])


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model": "tiny-gpt"}, "of another model"),
        ({"strategy__precision": "bf16"}, "strategy.precision"),
        ({"training__optimizer__name": "sgd"}, "was written with 'adamw'"),
        ({"training__global_batch": 4}, "training.global_batch: is 4"),
        ({"checkpoint__load": "nowhere"}, "nowhere is not a finished checkpoint"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_its_problems(
    tmp_path: Path, text: Path, saved: Path, changes: dict[str, Any], words: str
) -> None:
    code, records = trained(tmp_path / "again", text, **{"checkpoint__load": str(saved), **changes})
    assert (code, steps(records, "step")) == (1, [])
    error = refusal(tmp_path / "again")
    assert error["type"] == "PlanError" and words in error["message"]


def test_a_larger_shape_of_the_same_names_is_refused(
    tmp_path: Path, text: Path, saved: Path
) -> None:
    code, _ = trained(tmp_path / "again", text, "small", checkpoint__load=str(saved))
    message = refusal(tmp_path / "again")["message"]
    assert (
        code == 1
        and "model.hidden: is 384" in message
        and "of another model: there it is 128" in message
    )


def test_a_full_disk_costs_a_checkpoint_and_not_the_training(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint_format.write_rank_file

    def full(folder: Path, *rest: Any) -> None:
        if "step-00000002" in folder.name:
            raise OSError(28, "No space left on device")
        write(folder, *rest)

    monkeypatch.setattr(checkpoint_format, "write_rank_file", full)
    for asynchronous in (True, False):
        folder = tmp_path / str(asynchronous)
        changes = {
            "training__steps": 5,
            "checkpoint__every": 1,
            "checkpoint__asynchronous": asynchronous,
        }
        code, records = trained(folder, text, **changes)
        assert (code, steps(records, "checkpoint")) == (0, [1, 3, 4, 5]) and len(
            steps(records, "step")
        ) == 5
        (message,) = (record["message"] for record in records if record["kind"] == "unsaved")
        assert (
            "cannot write" in message
            and "step-00000002" in message
            and "checkpoint.keep" in message
        )
        left = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
        assert left == ["step-00000004", "step-00000005"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_without_the_checkpoint_of_its_last_step_fails(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    write = checkpoint_format.write_rank_file

    def full(folder: Path, *rest: Any) -> None:
        if "step-00000003" in folder.name:
            raise OSError(28, "No space left on device")
        write(folder, *rest)

    monkeypatch.setattr(checkpoint_format, "write_rank_file", full)
    changes = {
        "finetune__lora__rank": 2,
        "finetune__steps": 3,
        "checkpoint__every": 2,
        "checkpoint__asynchronous": asynchronous,
    }
    code, records = trained(tmp_path, text, **changes)
    assert (code, steps(records, "checkpoint"), len(steps(records, "step"))) == (1, [2], 3)
    error = refusal(tmp_path)["message"]
    assert "cannot write" in error and "step-00000003" in error and "No space left" in error


def test_dying_while_saving_leaves_the_former_checkpoint(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = checkpoint_format.commit_checkpoint

    def die_at_two(writing: Path, final: Path, *rest: Any) -> None:
        if final.name == "step-00000002":
            os.kill(os.getpid(), signal.SIGKILL)
        commit(writing, final, *rest)

    monkeypatch.setattr(checkpoint_format, "commit_checkpoint", die_at_two)
    code, _ = trained(tmp_path / "run", text, checkpoint__every=1)
    folder = tmp_path / "run" / "checkpoints"
    assert code == -signal.SIGKILL and [path.name for path in finished_checkpoints(folder)] == [
        "step-00000001"
    ]
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    again = {"checkpoint__load": str(folder / "step-00000001"), "checkpoint__every": 1}
    code, records = trained(tmp_path / "again", text, **again)
    assert (code, steps(records, "checkpoint")) == (0, [2, 3])
