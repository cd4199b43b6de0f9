"""What an import says when it refuses: the key, the lines and every name at once, in words and not
in Python's.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.interop.foreign_samples import GPU_NAME, problems
from workbench import interop

JOB = '[model]\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nsteps = 100\n'


def read(text: str, **given: Any) -> dict[str, Any]:
    return problems(interop.read, text, **{"gpu": GPU_NAME, "gpus": 8, **given})


def test_every_unknown_key_is_named_with_close_names_only() -> None:
    found = read(JOB + "zork = 3\nsteqs = 4\n[parallelism]\ntensor_paralel_degree = 2\n")
    assert set(found) == {"training.zork", "training.steqs", "parallelism.tensor_paralel_degree"}
    assert "did you mean training.steps" in found["training.steqs"]
    assert (
        "did you mean parallelism.tensor_parallel_degree"
        in found["parallelism.tensor_paralel_degree"]
    )
    assert (
        "did you mean" not in found["training.zork"] and "for example" not in found["training.zork"]
    )
    assert "--lenient" in found["training.zork"]


def test_a_close_name_of_another_section_is_offered() -> None:
    (message,) = read(JOB + "expert_parallel_degre = 2\n").values()
    assert "did you mean parallelism.expert_parallel_degree" in message


@pytest.mark.parametrize(
    "more, field, words",
    [
        ("steps = 200\n", "training.steps", "is written twice (lines 5 and 6)"),
        ("[model]\nname = 'llama3'\n", "model", "is written twice (lines 1 and 6)"),
        ("[optimizer]\nlr = 1e-3\nlr = 2e-3\n", "optimizer.lr", "is written twice (lines 7 and 8)"),
        ("a = {b = 1, b = 2}\n", "file", "not valid TOML"),
    ],
)
def test_a_key_that_toml_has_twice_is_named_with_its_lines(
    more: str, field: str, words: str
) -> None:
    assert words in read(JOB + more)[field]


def test_a_file_that_is_no_text_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"ab\xff\xfe")
    (message,) = problems(interop.load, tmp_path / "job.toml").values()
    assert message == "cannot be read: byte 2 is 0xff, which is no UTF-8 text"


def test_a_missing_word_is_not_none() -> None:
    message = read("fsdp_config: {fsdp_version: 2}\nnum_processes: 8\n", model="tiny")[
        "distributed_type"
    ]
    assert message.startswith("is missing; legal here: FSDP")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("stage: sft\nfinetuning_type: full\nlearning_rate: {a: 1}\n", "learning_rate"),
        ("base_model: x\nmicro_batch_size: {a: 1}\nsequence_len: 8\n", "micro_batch_size"),
        ("distributed_type: MULTI_GPU\nnum_processes: {a: 1}\n", "num_processes"),
        ("zero_optimization: {stage: {a: 1}}\n", "zero_optimization.stage"),
        ("[model]\nflavor = '8B'\n[training]\nsteps = {a = 1}\n", "training.steps"),
    ],
)
def test_a_section_in_place_of_a_value_is_refused(text: str, key: str) -> None:
    assert "must be a value" in read(text, model="tiny")[key]


@pytest.mark.parametrize("value", ["-1", ".nan", "5"])
@pytest.mark.parametrize("key", ["report_to", "fsdp"])
def test_words_of_no_kind_are_refused(key: str, value: str) -> None:
    text = "stage: sft\nmodel_name_or_path: x\nfinetuning_type: full\n"
    assert key in read(f"{text}{key}: {value}\n", model="tiny")


def test_a_schedule_that_no_trainer_has_is_refused() -> None:
    text = "stage: sft\nmodel_name_or_path: x\nfinetuning_type: full\nlr_scheduler_type: cosin\n"
    assert "warmup_stable_decay" in read(text, model="tiny")["lr_scheduler_type"]


def test_yaml_that_cannot_be_read_is_not_called_another_format() -> None:
    text = "stage: sft\nmodel_name_or_path: x\nlora_rank: 8\nlora_rank: 16\n"
    assert "twice (lines 3 and 4)" in read(text, model="tiny")["lora_rank"]


def test_what_python_leaves_open_in_place_of_a_section_is_shown_as_written() -> None:
    text = (
        "from torchtitan.models.llama3 import model_registry\n"
        "from torchtitan.trainer import Trainer\n\n"
        "def base() -> Trainer.Config:\n"
        "    return Trainer.Config(model_spec=model_registry('8B'), training=[x for x in y])\n"
    )
    (said,) = read(text).values()
    assert "[x for x in y]" in said and "UndecidedValue" not in said
