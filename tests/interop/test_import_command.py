"""The two commands and the two verbs on foreign configurations: tables for people, JSON for
machines, files whole.
"""

import json
from pathlib import Path

import pytest

import workbench as wb
from tests.conftest import Ask
from workbench import interop
from workbench.plan.schema import Plan

SAMPLES = Path(__file__).parent / "foreign"
GPU_NAME = "h100-sxm-80gb"
BESIDE = ["--model", "llama-3-8b", "--gpu", GPU_NAME]


def test_import_writes_a_plan_and_tells_what_it_left(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    code, out, _ = ask("import", SAMPLES / "ds_config.json", *BESIDE, "-o", path, "--json")
    data = json.loads(out)
    assert (
        code == 0
        and data["format"] == "deepspeed"
        and data["world_size"] == 16
        and data["path"] == str(path)
    )
    assert {
        "field": "steps_per_print",
        "value": 20,
        "why": "logging; a run keeps its own telemetry",
    } in data["untranslated"]
    assert "train_batch_size" in data["translated"] and data["assumed"]
    assert (
        Plan.load(path)
        == interop.load(SAMPLES / "ds_config.json", model="llama-3-8b", gpu=GPU_NAME).plan
    )


def test_import_sets_fields_and_takes_a_vocabulary(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "args"
    file.write_text("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1")
    words = ["--vocab-size", 512, "--set", "strategy.tensor.size=2", "--set", "cluster.gpus=4"]
    code, out, _ = ask("import", file, "--gpu", GPU_NAME, *words, "--json")
    data = json.loads(out)
    assert (
        code == 0
        and data["sizes"]["tensor"] == 2
        and data["world_size"] == 4
        and data["unknown"] == []
    )
    assert data["ignored"] == [
        {"field": "strategy.tensor.size", "value": 1, "why": "what the file means; 2 is set"}
    ]
    code, out, _ = ask("import", file, "--gpu", GPU_NAME, *words)
    assert code == 0 and "Ignored" in out and "Unknown" not in out


def test_import_shows_tables(ask: Ask) -> None:
    code, out, _ = ask("import", SAMPLES / "torchtitan.toml", "--gpu", GPU_NAME)
    assert code == 0 and "torchtitan job" in out and "stack: torchtitan" in out
    assert (
        "Not translated" in out
        and "parallelism.enable_async_tensor_parallel" in out
        and "Assumed" in out
    )


def test_what_is_missing_is_asked_for(ask: Ask) -> None:
    code, out, err = ask("import", SAMPLES / "ds_config.json", "--gpu", GPU_NAME, "--json")
    assert code == 2 and json.loads(out)["problems"][0]["field"] == "model" and "--model" in err


def test_unknown_keys_are_refused_or_told(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8, "zero_optimisation": {"stage": 1}}')
    code, _, err = ask("import", file, *BESIDE, "--gpus", 8)
    assert code == 2 and "did you mean zero_optimization" in err and "Traceback" not in err
    code, out, _ = ask("import", file, *BESIDE, "--gpus", 8, "--lenient", "--json")
    assert code == 0 and json.loads(out)["untranslated"][0]["field"] == "zero_optimisation.stage"


@pytest.mark.parametrize("format", interop.FORMATS)
def test_translate_writes_each_format(ask: Ask, tmp_path: Path, format: str) -> None:
    path, plan = tmp_path / "out", tmp_path / "plan.yaml"
    plan.write_text(Plan.of("llama-3-8b", gpu=GPU_NAME, gpus=16, strategy="zero-3").to_yaml())
    code, out, _ = ask("translate", plan, "--as", format, "-o", path, "--json")
    data = json.loads(out)
    assert code == 0 and path.read_text() == data["text"] and interop.detect(data["text"]) == format
    assert "cluster.gpu" in {row["field"] for row in data["untranslated"]}
    code, out, _ = ask("translate", plan, "--as", format)
    assert code == 0 and "Not translated" in out and GPU_NAME in out


def test_translate_refuses_an_unknown_format_and_an_unwritable_file(
    ask: Ask, tmp_path: Path
) -> None:
    choice = ["--model", "tiny", "--gpu", GPU_NAME, "--gpus", "4", "--strategy", "ddp"]
    code, _, err = ask("translate", *choice, "--as", "nemo")
    assert code == 2 and "legal: deepspeed, megatron, torchtitan, fsdp" in err
    code, _, err = ask("translate", *choice, "--as", "fsdp", "-o", tmp_path / "no" / "where")
    assert code == 2 and "--output" in err


def test_the_notebook_speaks_the_same_words(tmp_path: Path) -> None:
    found = wb.import_config(SAMPLES / "megatron.sh", gpu=GPU_NAME)
    assert found.plan.world_size == 32 and found.format == "megatron"
    text, lost = wb.translate(found.plan, "torchtitan", framework_version="0.2.2")
    assert "tensor_parallel_degree = 2" in text and "model" in {note.field for note in lost}
