"""`workbench profile-layers`, and layer profiles as models on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench import cli
from workbench.runs.launch import child_process
from workbench.runs.measure import profile_layers as measuring

PLAN = """
model: {layers: 2, hidden: 32, heads: 4, ffn: 64, vocab: 260}
cluster: {gpu: local, gpus: 2}
strategy: {pipeline: {size: 2}}
training: {global_batch: 8, micro_batch: 2, sequence_length: 16}
"""
LAYERS = """\
model,profile_batch,index,node,layer,forward_ms,backward_ms,activation_bytes,parameter_bytes,inputs
m,2,0,a,first,20,40,1000,4000,
m,2,1,b,second,10,20,1000,4000,a
"""


@pytest.fixture
def plan(tmp_path: Path) -> str:
    (tmp_path / "plan.yaml").write_text(PLAN)
    return str(tmp_path / "plan.yaml")


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    (tmp_path / "layers.csv").write_text(LAYERS)
    return tmp_path / "layers.csv"


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, layers: Path) -> dict[str, Any]:
    """A child process that measures nothing; what it was started with."""
    seen: dict[str, Any] = {}

    def python(
        module: str, arguments: list[str], on_line: Callable[[str], None], **options: Any
    ) -> None:
        seen.update(options, module=module, plan=Path(arguments[0]).read_text())
        for printed in ('{"words": 1}', "{", "[1]", '{"done": "x", "of": 1}'):
            on_line(printed)  # by the model
        on_line(json.dumps({"done": 3.0, "of": 5.0, "words": "pass 7"}))
        Path(arguments[arguments.index("--to") + 1]).write_text(LAYERS)

    monkeypatch.setattr(child_process, "python", python)
    return seen


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.answer(arguments)
    found = capsys.readouterr()
    return code, found.out, found.err


def test_the_file_is_written_and_shown(
    child: dict[str, Any], plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.csv"
    code, out, err = said(
        ["profile-layers", plan, "-o", str(path), "--seconds", "5", "--json"], capsys
    )
    answer = json.loads(out)
    assert code == 0 and "pass 7, 3 of 5 s" in err
    assert (answer["source"], answer["path"]) == ("measured", str(path))
    assert answer["forward_seconds"] == pytest.approx(0.03)
    assert [layer["name"] for layer in answer["layers"]] == ["first", "second"]
    assert path.read_text().splitlines()[0].startswith(LAYERS.splitlines()[0])
    assert child["module"] == "workbench.engine.layer_times"
    assert child["deadline_seconds"] == 5 + measuring.PREPARING_SECONDS
    code, out, _ = said(["profile-layers", plan, "-o", str(path)], capsys)
    assert code == 0 and "second" in out and "30.0 ms" in out and f"--model {path}" in out


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--seconds", "0"], "seconds: is 0; legal: 0.1 to 3600"),
        (["-o", "/nowhere/layers.csv"], "--output: '/nowhere/layers.csv' cannot be written"),
        (["-o", "/proc/layers.csv"], "--output: '/proc/layers.csv' cannot be written; legal"),
        (["-o", "layers.txt"], "--output: is 'layers.txt'; legal: a name that ends in .csv"),
        (["-o", "UP.CSV"], "--output: is 'UP.CSV'; legal: a name that ends in .csv"),
        (["-o", "a.csv#b.csv"], "--output: is 'a.csv#b.csv'; legal: a name that ends in .csv"),
        (["--gpu", "h100-sxm-80gb"], "cluster.gpu: 1 x h100-sxm-80gb needs cuda devices"),
        (["--model", "gpt3-175b"], "model: gpt3-175b has"),
        (["--set", "strategy.stack=megatron"], "strategy.stack: is 'megatron'"),
        (
            ["--set", "model={python: a.b:c, vocab: 300}", "--set", "strategy.pipeline.size=1"],
            "model.python: 'a.b:c' is code, which runs only where you say so",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(
    child: dict[str, Any],
    plan: str,
    options: list[str],
    field: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = said(["profile-layers", plan, *options], capsys)
    assert code == 2 and field in err and not child


def test_a_plan_is_not_overwritten(
    child: dict[str, Any], plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plan.yaml", "plan.csv"):
        path = tmp_path / name
        path.write_text(PLAN)
        code, _, err = said(["profile-layers", str(path), "-o", str(path)], capsys)
        assert code == 2 and "--output: " in err and path.read_text() == PLAN and not child


def test_a_child_without_layers_is_an_error(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child_process, "python", lambda *_, **__: None)
    code, _, err = said(["profile-layers", plan, "-o", str(tmp_path / "out.csv")], capsys)
    assert code == 1 and "measuring ended without layers" in err


def test_a_layer_profile_is_a_model(layers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--model", str(layers), "--gpu", "v100-sxm2-16gb", "--gpus", "3"]
    chosen += ["--set", "strategy.pipeline={size: 2, replicas: [2, 1]}"]
    code, out, _ = said(["estimate", *chosen], capsys)
    assert code == 0
    for shown in ("layer profile", "activation-communication ratio (ACR)", "closed form"):
        assert shown in out
    code, plan_text, _ = said(["plan", *chosen], capsys)
    assert code == 0 and "recompute, attention and kernels as measured" in plan_text
    code, out, _ = said(["estimate", *chosen, "--json"], capsys)
    answer = json.loads(out)
    assert answer["source"] == "estimated" and answer["microbatches_in_flight"] == [2, 1]


def test_answers_say_on_what_the_times_were_measured(
    layers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, *rows = LAYERS.splitlines()
    with_source = [f"{head},source", *(f"{row},measured 2026-01-01 on CPU" for row in rows)]
    for text, words in (
        (LAYERS, "as measured (the file does not say on what); not scaled to v100-sxm2-16gb"),
        ("\n".join(with_source), "as measured 2026-01-01 on CPU; not scaled to v100-sxm2-16gb"),
    ):
        layers.write_text(text)
        chosen = ["--model", str(layers), "--gpu", "v100-sxm2-16gb", "--gpus", "2"]
        for verb in ("estimate", "search"):
            code, out, _ = said([verb, *chosen], capsys)
            assert code == 0 and words in " ".join(out.replace("│", " ").split())
            code, out, _ = said([verb, *chosen, "--json"], capsys)
            assert code == 0 and words in json.loads(out)["layer_times"]


@pytest.mark.parametrize(
    "command", [["run"], ["rehearse"], ["verify"], ["export", "--to", "folder"]]
)
def test_a_layer_profile_does_not_run(
    command: list[str], layers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = said([*command, "--model", str(layers)], capsys)
    assert code == 2 and f"model: '{layers}' is a layer profile, which has no code to" in err


@pytest.mark.parametrize(
    ("old", "new", "cell"),
    [
        ("20,40", "-20,40", "row 2, forward_ms: is '-20'; legal: a number from 0"),
        ("10,20", "10,", "row 3, backward_ms: is missing; legal: a number from 0"),
        (",1000,4000,a", ",1000,nan,a", "row 3, parameter_bytes: is 'nan'"),
        ("4000,a", "4000,x", "row 3, inputs: 'x' is no node of this model"),
        (LAYERS, "model,layer\n", "lacks the columns profile_batch"),
    ],
)
def test_wrong_figures_are_refused_by_row_and_column(
    layers: Path, old: str, new: str, cell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layers.write_text(LAYERS.replace(old, new))
    code, _, err = said(["estimate", "--model", str(layers)], capsys)
    assert code == 2 and cell in err


@pytest.mark.slow
def test_measured_layers_can_be_estimated(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "measured.csv")
    assert said(["profile-layers", plan, "-o", path, "--seconds", "0.1"], capsys)[0] == 0
    code, out, _ = said(
        ["estimate", plan, "--model", path, "--json"], capsys
    )  # the same plan, on its measured layers
    answer = json.loads(out)
    assert code == 0 and answer["fits"] and "torch" in answer["layer_times"]
