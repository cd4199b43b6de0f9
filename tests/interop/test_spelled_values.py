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
