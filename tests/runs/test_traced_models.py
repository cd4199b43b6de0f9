"""A trace of a user's module is used again while what its code read stays as it was."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.engine.python_model.trace_graph import main as trace_graph_main
from workbench.engine.python_model.trace_graph import trace_graph
from workbench.plan.operators.traced.traced_json import model_to_json
from workbench.plan.schema import Plan, parse_plan
from workbench.runs.launch import child_process, traced_models
from workbench.safe_io.files import file_states

MODEL = """
from pathlib import Path
from torch import nn
import their_width
def model():
    width = their_width.WIDTH * int(Path("times.txt").read_text())
    return nn.Sequential(nn.Embedding(260, width), nn.Linear(width, 260))
"""


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The children that were started; each answers as the real one, from this process."""
    started: list[str] = []

    def python(module: str, arguments: list[str], on_line: Callable[[str], None]) -> None:
        started.append(module)
        on_line(json.dumps({"model": answer, "files": file_states(["their_model.py"])}))

    plan = plan_of("tests.parallel.users_language_models:encoder_lm")
    answer = model_to_json(trace_graph(plan, allow_code=True))
    monkeypatch.setattr(child_process, "python", python)
    monkeypatch.setattr(traced_models, "_kept", {})
    return started


def plan_of(model: str, **strategy: object) -> Plan:
    plan = parse_plan(f"""
model: {{python: "{model}", vocab: 260}}
cluster: {{gpu: local, gpus: 2}}
training: {{sequence_length: 16, micro_batch: 2, global_batch: 8}}
""")
    return plan.replace(strategy=strategy)


def test_a_trace_is_used_again_until_a_file_or_the_microbatch_changes(
    traces: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("their_model.py").write_text("old")
    plan = plan_of("their_model:model")
    first = traced_models.traced_model(plan, allow_code=True)
    again = plan_of("their_model:model", data={"zero": 2}, pipeline={"size": 2})
    assert traced_models.traced_model(again, allow_code=True) == first
    assert len(traces) == 1
    traced_models.traced_model(plan, allow_code=True, sequences=1)
    assert len(traces) == 2
    Path("their_model.py").write_text("newer")
    traced_models.traced_model(plan, allow_code=True)
    assert len(traces) == 3
    Path("their_model.py").unlink()
    traced_models.traced_model(plan, allow_code=True)
    assert len(traces) == 4


def test_files_that_a_module_imports_and_reads_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in {
        "a_users_model.py": MODEL.replace("their_width", "a_users_width"),
        "a_users_width.py": "WIDTH = 8",
        "times.txt": "2",
    }.items():
        Path(name).write_text(text)
    written = tmp_path / "plan.yaml"
    written.write_text(plan_of("a_users_model:model").to_yaml())
    monkeypatch.setattr("sys.argv", ["trace_graph", str(written), "--allow-code"])
    assert trace_graph_main() == 0
    files = json.loads(capsys.readouterr().out)["files"]
    names = {Path(path).name for path in files}
    assert {"a_users_model.py", "a_users_width.py", "times.txt"} <= names
    assert "plan.yaml" not in names, "it is written anew for each trace"
    assert not any("torch" in Path(path).parts for path in files)
