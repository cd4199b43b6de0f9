"""Run directories that something has damaged: every verb that reads one answers, or refuses in
words.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden.cases import HERE, RUN
from workbench.checkpoint.manifest import manifest_text
from workbench.cli import answer
from workbench.engine.export import export_weights as engine_weights
from workbench.lab.live.run_status import RunProgress, run_banner
from workbench.runs.launch import child_process
from workbench.runs.store.telemetry_reader import Reader
from workbench.verbs import attach, compare

SOUND = HERE / "run_directory" / RUN
TELEMETRY = Path("telemetry/rank00001.jsonl")
MANIFEST = Path("checkpoints/step-00000006/manifest.json")
Damage = Callable[[Path], None]


def written(path: Path | str, content: bytes) -> Damage:
    def damage(run: Path) -> None:
        (run / path).write_bytes(content)

    return damage


def told(*records: Any) -> Damage:
    """More lines in a rank's telemetry."""

    def add(run: Path) -> None:
        with (run / TELEMETRY).open("ab") as file:
            file.writelines(json.dumps(record).encode() + b"\n" for record in records)

    return add


def state(**changes: Any) -> Damage:
    def change(run: Path) -> None:
        now = json.loads((run / "state.json").read_text())
        (run / "state.json").write_text(json.dumps({**now, **changes}))

    return change


def manifest(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """A manifest that is not what a run writes, with a checksum that fits."""

    def edit(run: Path) -> None:
        body = json.loads((run / MANIFEST).read_text())
        del body["sha256"]
        change(body)
        (run / MANIFEST).write_text(manifest_text(body))

    return edit


def replaced(path: Path | str, how: str) -> Damage:
    """A file that is gone, a folder, a pipe, a link to nowhere or a device in its place."""

    def replace(run: Path) -> None:
        target = run / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        if how == "folder":
            target.mkdir()
        elif how == "pipe":
            os.mkfifo(target)
        elif how != "gone":
            target.symlink_to({"link": "nowhere", "device": "/dev/zero", "loop": target.name}[how])

    return replace


def step(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "step",
        "t": 1.0,
        "step": 6,
        "loss": 1.0,
        "seconds": 0.1,
        "tokens": 64,
        **changes,
    }


HERE_NOW = {"phase": "running", "host": platform.node(), "heartbeat": time.time()}
ROW = {"stage": 0, "moment": "peak", "tier": "device", "category": "allocated", "bytes": 1}
DAMAGES: dict[str, Damage] = {
    "rows no list": told({"kind": "memory", "t": 1, "step": 1, "rows": 5}),
    "rows of text": told({"kind": "memory", "t": 1, "step": 1, "rows": ["a"]}),
    "kind a list": told({"kind": [1], "t": 1}),
    "step text": told(step(step="x")),
    "steps of two types": told(
        step(step="x"), {"kind": "checkpoint", "t": 1, "step": "a", "path": "a"}
    ),
    "nulls": told(
        *({"kind": "memory", "t": 1, "step": 1, "rows": [{**ROW, name: None}]} for name in ROW)
    ),
    "everything null": told(
        step(**dict.fromkeys(("loss", "gradient_norm", "learning_rate", "skipped", "bytes")))
    ),
    "huge numbers": told(step(bytes=1e300, seconds=1e300), step(step=2**63), step(tokens=10**30)),
    "numbers at the edge": told(
        step(seconds=2**52, tokens=2**52, bytes=-(2**52), loss=-(2**52)), step(seconds=0.0)
    ),
    "negative time": told(step(seconds=-1.0, tokens=-5)),
    "a step far ahead": told(step(step=2**52)),
    "steps twice": told(step(step=0), step(step=0), step(step=3)),
    "evaluation null": told({"kind": "evaluation", "t": 1, "step": 3, "loss": None}),
    "unknown kind": told({"kind": "of a later version", "t": 1}),
    "unknown words": told(
        {
            "kind": "timeline",
            "t": 1,
            "step": 1,
            "rows": [{"stage": 7, "microbatch": None, "action": "?", "start": 5.0, "end": 1.0}],
        }
    ),
    "unknown collective": told(
        {
            "kind": "collectives",
            "t": 1,
            "step": 1,
            "rows": [
                {"axis": "?", "kind": "?", "group_size": 0, "dtype": None, "bytes": 0, "count": 0}
            ],
        }
    ),
    "pid text": told({"kind": "hello", "t": 1, "rank": 1, "pid": "12"}),
    "binary telemetry": written(TELEMETRY, bytes(range(256)) * 10),
    "empty telemetry": written(TELEMETRY, b""),
    "telemetry of a rank too many": written(
        "telemetry/rank00009.jsonl", json.dumps(step()).encode() + b"\n"
    ),
    **{
        f"telemetry: {how}": replaced(TELEMETRY, how)
        for how in ("gone", "folder", "pipe", "link", "device", "loop")
    },
    "telemetry folder gone": replaced("telemetry", "gone"),
    "telemetry folder a link": replaced("telemetry", "link"),
    "state binary": written("state.json", b"\xff\x00"),
    "state a list": written("state.json", b"[1]"),
    "state nested": written("state.json", b"[" * 100_000),
    "state phase a list": state(phase=["running"]),
    "state pid text": state(**HERE_NOW, supervisor_pid="12", supervisor_created=1.0),
    "state pid huge": state(**HERE_NOW, supervisor_pid=2**80, supervisor_created=1.0),
    "state pid negative": state(**HERE_NOW, supervisor_pid=-5, supervisor_created=1.0),
    "state world text": state(world_size="2"),
    "state host number": state(phase="running", host=5),
    "state times": state(started=1e300, ended=-1e300, heartbeat=2**80),
    "state exit code": state(exit_code=[1]),
    "cause text": state(phase="failed", cause="it"),
    "cause of numbers": state(
        phase="failed", cause={"rank": "x", "message": 5, "advice": [1], "log_tail": 7}
    ),
    "cause without message": state(phase="failed", cause={"rank": 1}),
    "cause of markup": state(
        phase="failed", cause={"rank": 1, "message": "[/x] \x1b[2J", "advice": "[red]"}
    ),
    **{f"state: {how}": replaced("state.json", how) for how in ("gone", "folder", "link", "loop")},
    "plan binary": written("plan.yaml", b"\xff\x00"),
    "plan a list": written("plan.yaml", b"- 1\n"),
    "plan unclosed": written("plan.yaml", b"model: ["),
    "plan empty": written("plan.yaml", b""),
    **{f"plan: {how}": replaced("plan.yaml", how) for how in ("gone", "folder", "link", "loop")},
    **{f"logs: {how}": replaced("logs", how) for how in ("gone", "link")},
    "frames gone": replaced("frames", "gone"),
    "checkpoints gone": replaced("checkpoints", "gone"),
    "checkpoints a link": replaced("checkpoints", "link"),
    "manifest binary": written(MANIFEST, b"\xff\x00"),
    "manifest nested": written(MANIFEST, b"[" * 100_000),
    "manifest a list": written(MANIFEST, b"[5]"),
    "manifest entry a number": manifest(lambda body: body.update(files=[5])),
    "manifest path outside": manifest(
        lambda body: body["files"][0].update(file="../../../outside.safetensors")
    ),
    "manifest meta text": manifest(lambda body: body.update(meta="text")),
    "manifest model text": manifest(lambda body: body["meta"].update(model="text")),
    "manifest model empty": manifest(lambda body: body["meta"].update(model={})),
    "manifest model code": manifest(lambda body: body["meta"].update(model={"python": 5})),
    "manifest version": manifest(lambda body: body.update(version="2")),
    "manifest without files": manifest(lambda body: body.update(files=[])),
    "manifest dtype": manifest(
        lambda body: [t.update(dtype="Q4") for t in body["files"][0]["tensors"]]
    ),
    "manifest key": manifest(
        lambda body: [t.update(key="other") for t in body["files"][0]["tensors"]]
    ),
    "manifest shape": manifest(
        lambda body: [
            t.update(shape=[2**50] * len(t["shape"])) for t in body["files"][0]["tensors"]
        ]
    ),
    **{f"manifest: {how}": replaced(MANIFEST, how) for how in ("gone", "folder", "link", "loop")},
    "tensors cut": written("checkpoints/step-00000006/rank00000.safetensors", b"\x08"),
    "tensors: link": replaced("checkpoints/step-00000006/rank00000.safetensors", "link"),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shutil.copytree(SOUND, tmp_path / "runs" / RUN)


def asked(*words: object) -> tuple[int, str]:
    """(exit code, both streams) of a command line run in this process; whatever it raises comes
    out.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        return answer([str(word) for word in words]), said.getvalue()


def in_this_process(module: str, words: list[str], line: Callable[[str], None]) -> None:
    """A child that exports weights, without the seconds that it takes to load torch."""
    assert module == "workbench.engine.export.export_weights"
    line(json.dumps(engine_weights.export_checkpoint(Path(words[0]), Path(words[2]))))


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_run_directory_is_answered_or_refused(
    run: Path, monkeypatch: Any, damage: Damage
) -> None:
    monkeypatch.setattr(child_process, "python", in_this_process)
    damage(run)
    out = run.parent.parent / "weights"
    for words in (
        ("attach", run, "--once"),
        ("compare", run, "--no-rehearse", "--json"),
        ("runs", "--root", run.parent),
        ("weights", run, "--to", out),
    ):
        code, said = asked(*words)
        assert code in (0, 2), (words, said)
    with contextlib.suppress(ValueError):
        assert all(
            isinstance(figure.rows, list) for figure in compare(run, rehearsed=False).figures()
        )
        progress = RunProgress(6, 2)
        progress.add_records(Reader(run).poll())
        assert run_banner("a run", attach(run).state, progress)


def test_a_sound_run_directory_is_answered(run: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(child_process, "python", in_this_process)
    for words in (
        ("attach", run, "--once"),
        ("compare", run, "--no-rehearse"),
        ("runs", "--root", run.parent),
    ):
        code, said = asked(*words)
        assert code == 0 and "left out" not in said


def test_what_is_left_out_is_said(run: Path) -> None:
    told(step(step="x"), [1])(run)
    for words in (
        ("attach", run, "--once"),
        ("attach", run, "--once", "--json"),
        ("compare", run, "--no-rehearse"),
    ):
        code, said = asked(*words)
        assert code == 0 and "2 damaged records of rank 1" in " ".join(said.split())
