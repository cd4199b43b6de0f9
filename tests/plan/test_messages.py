"""What a person is told of a file that is no plan: bounded however much stands in it, and in words
of ours.

Not in Python's, pydantic's or a codec's: those name what a reader of the message never wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench import interop
from workbench.errors import PlanError, Problem
from workbench.fields.validation_messages import _without_parents
from workbench.interop import foreign_keys
from workbench.interop.missing_fields import ask_for_missing
from workbench.interop.translation import Imported, ImportOptions, MissingField
from workbench.machine import calibration_file
from workbench.plan.catalog import huggingface_config
from workbench.plan.model.model_shape import shape_from
from workbench.plan.plan_data import changed
from workbench.plan.schema import Plan, build_plan, parse_plan
from workbench.safe_io import json_files, yaml_files

LONG = "x" * 100_000
MOST = 10_000
FOREIGN = (
    "pydantic",
    "Input should",
    "NoneType",
    "invalid literal",
    "codec",
    "Errno",
    "embedded",
    "<class",
    "sys.",
)
PLAN = {"model": "tiny", "cluster": {"gpu": "local", "gpus": 2}, "strategy": {"preset": "ddp"}}


def told(work: Callable[..., object], *arguments: Any) -> str:
    with pytest.raises(PlanError) as caught:
        work(*arguments)
    assert not [word for word in FOREIGN if word in str(caught.value)]
    assert len(str(caught.value)) < MOST
    return str(caught.value)


def plan_with(changes: dict[str, Any]) -> Plan:
    return build_plan(changed(PLAN, changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cluster.fabric.python": 1}, "cluster.fabric.python: unknown key"),
        ({"cluster.gpu": {"python": 1}}, "cluster.gpu.python: unknown key"),
        (
            {"strategy.data.shard": {"a": 1}},
            "strategy.data.shard: is {'a': 1}; must be an integer or one of 'all'",
        ),
        ({"strategy.data.shard": {"a": 1}, "cluster.gpus": 0}, "cluster.gpus: is 0"),
        ({"strategy.data.shard": {"a": 1}, "cluster.gpus": 0}, "strategy.data.shard: is {'a': 1}"),
        ({"strategy.tensor.size": []}, "a list of at least 1"),
        ({"strategy.tensor.size": [2, "x"]}, "strategy.tensor.size.1: is 'x'; must be an integer"),
        ({"model": {"python": 3, "vocab": 1}}, "model.python: is 3; must be text"),
        ({f"training.{LONG}": 1}, "unknown key"),
        ({"model": {"python": LONG, "vocab": 1}}, "legal: pkg.module:factory"),
        ({"model": {f"k{i}": i for i in range(500)}}, "and 4"),
        ({"cluster.gpus.many": LONG}, "cluster.gpus is 2 and has no fields"),
    ],
)
def test_a_wrong_field_of_a_union_or_of_any_length_is_named(
    changes: dict[str, Any], words: str
) -> None:
    assert words in told(plan_with, changes)


def test_a_long_message_keeps_its_beginning_and_what_is_legal() -> None:
    said = str(Problem(LONG, f"is '{LONG}'; legal: 1 to 3"))
    assert (
        len(said) < 3_000
        and said.startswith("xxx")
        and said.endswith("; legal: 1 to 3")
        and "left out" in said
    )
    error = PlanError([Problem(f"k{i}", "is wrong") for i in range(50)])
    assert len(error.problems) == 50 and str(error).endswith("and 30 more")


class Field(str):
    """A field's name that counts how often names are compared."""

    compared = 0

    def startswith(self, *arguments: Any) -> bool:
        Field.compared += 1
        return super().startswith(*arguments)


def test_a_field_is_left_out_for_one_inside_it_without_comparing_each_with_all() -> None:
    inside = [Problem(Field(f"model.k{i:03}"), "unknown key") for i in range(300)]
    kept = _without_parents(
        [Problem(Field("model"), "is wrong"), *inside, Problem(Field("models"), "unknown key")]
    )
    assert [problem.field for problem in kept] == [*(problem.field for problem in inside), "models"]
    assert Field.compared <= 2 * 302


def test_a_file_is_read_a_few_times_only_however_much_it_lacks() -> None:
    reads: list[ImportOptions] = []

    def read(given: ImportOptions) -> Imported:
        reads.append(given)
        raise MissingField(
            [Problem(f"field{len(reads)}", "is missing")], [{"gpus": 1}, {"gpus": 2}]
        )

    assert "field1: is missing" in told(ask_for_missing, read, ImportOptions(None, None, None))
    assert len(reads) <= 20


def test_keys_close_to_an_unknown_one_are_looked_for_only_where_they_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[str] = []

    def close(key: str, words: Any) -> list[str]:
        looked.append(key)
        return []

    monkeypatch.setattr(foreign_keys, "_close", close)
    text = json.dumps({"train_micro_batch_size_per_gpu": 8, **{f"k{i}": i for i in range(200)}})
    assert "and 180 more" in told(
        lambda: interop.read(text, gpu="h100-sxm-80gb", gpus=8, model="tiny")
    )
    assert len(looked) == 20


def test_an_unknown_key_of_a_shape_is_told_a_shapes_keys() -> None:
    said = told(
        shape_from, {"layers": 1, "hidden": 8, "heads": 1, "ffn": 8, "vocab": 8, "width": 3}
    )
    assert "width: unknown key; legal: name, layers" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("[1]", "this is [1]"),
        ("model: !!int zz", "line 1, column 8: 'zz' is no int"),
        ("model: !!float zz", "'zz' is no float"),
        ("model: !!bool maybe", "'maybe' is no bool"),
        ("model: " + "9" * 5000, "an integer of 5,000 digits"),
        (f"model: !!int {LONG}", "is no int"),
        ('model: "half\\ud800"', "half of a character"),
        ('"half\\ud800": 1', "half of a character"),
        (f"model: !{LONG} 1", "not valid YAML"),
        ("model: !!timestamp x", "is no timestamp"),
    ],
)
def test_yaml_that_is_no_plan_is_told_by_its_place(text: str, words: str) -> None:
    assert words in told(parse_plan, text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1, column 1"),
        ("{", "line 1, column 2"),
        ("9" * 5000, "an integer of 5,000 digits"),
        (f'{{"{LONG}": 1, "{LONG}": 1}}', "is written twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": "half\\ud800"}', "half of a character"),
        ('{"half\\uDfff": 1}', "half of a character"),
    ],
)
def test_json_is_told_by_its_place(text: str, words: str) -> None:
    assert words in told(json_files.parse, text, "config.json")


def test_numbers_that_python_writes_and_json_does_not_know_are_numbers_where_asked_for() -> None:
    assert json_files.parse("[Infinity]", "", constants=True) == [float("inf")]
    assert "no number of JSON" in told(json_files.parse, "[Infinity]", "")
    assert json_files.parse("\ufeff[1]", "") == yaml_files.parse("[1]")
    assert json_files.parse('["\\ud83d\\ude00"]', "") == ["\U0001f600"], (
        "both halves are a character"
    )


@pytest.mark.parametrize(
    "read",
    [
        Plan.load,
        calibration_file.read_calibration,
        huggingface_config.read_huggingface_config,
        interop.load,
    ],
)
@pytest.mark.parametrize("name", ["no\0file", "half\ud800", "binary", "x" * 5000, "."])
def test_what_is_no_text_file_is_told_so(
    tmp_path: Path, read: Callable[[str], object], name: str
) -> None:
    (tmp_path / "binary").write_bytes(b"ab\xff\xfe")
    said = told(read, f"{tmp_path}/{name}")
    assert name != "binary" or "byte 2 is 0xff, which is no UTF-8 text" in said


@pytest.mark.parametrize(
    "written", [None, [1], {"speed": 3}, {"version": LONG}, {LONG: 1}, {"gemm": [{"rows": "a"}]}]
)
def test_a_file_that_is_no_calibration_is_told_by_its_first_fault(
    tmp_path: Path, written: Any
) -> None:
    (tmp_path / "c.yaml").write_text(json.dumps(written))
    assert "is no calibration: " in told(calibration_file.read_calibration, tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"finetune.adapter": "../a"},
            r"^finetune\.adapter: is '../a'; must be text that matches ",
        ),
        ({"finetune.method": "full", "finetune.adapter": "a"}, "which has no adapters; legal"),
        ({"finetune.base_sha256": "0"}, r"^finetune\.base_sha256: .* finetune\.base does not name"),
    ],
)
def test_fields_of_fine_tuning_that_nothing_reads_are_refused(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        Plan.of("tiny-gpt", set=changes).resolve()


def test_a_task_section_that_is_removed_leaves_the_other() -> None:
    training = {"training": {"steps": 7}}
    assert changed(training, {"finetune": None}) == training | {"finetune": None}
    assert changed(training, {"finetune": {}}) == {"finetune": {}}
