"""A ds_config.json as DeepSpeed reads it, by Hjson: comments, and commas and quotes left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.interop.foreign_samples import GPU_NAME, problems
from workbench import interop
from workbench.errors import PlanError
from workbench.safe_io import hjson_files

WANTED = {"train_batch_size": 128, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
CONFIGS = {
    "json": json.dumps(WANTED),
    "comments": """{
  "train_batch_size": 128, // of all ranks
  /* 16 bits */
  "bf16": {"enabled": true},  # on
  "zero_optimization": {"stage": 2}
}
""",
    "before": '// DeepSpeed\n/* of\n two lines */\n{"train_batch_size": 128,\n'
    '"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}} // end\n',
    "commas": '{\n"train_batch_size": 128\n"bf16": {"enabled": true,},\n'
    '"zero_optimization": {"stage": 2}\n}',
    "quotes": "{\n  train_batch_size: 128 // of all\n  bf16: {\n    enabled: true\n  }\n"
    "  'zero_optimization': {stage: 2}\n}\n",
    "braces": "// none\ntrain_batch_size: 128 // of all\nbf16: {enabled: true}\n"
    "zero_optimization: {stage: 2}\n",
    "yaml": "train_batch_size: 128\nbf16:\n  enabled: true\nzero_optimization:\n  stage: 2\n",
    "flow": "{train_batch_size: 128, bf16: {enabled: true}, zero_optimization: {stage: 2}}",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_read_as_deepspeed_reads_it(name: str) -> None:
    found = interop.read(CONFIGS[name], model="llama-3-8b", gpu=GPU_NAME, gpus=16)
    full = found.plan.resolve()
    assert (found.format, full.training.global_batch) == ("deepspeed", 128)
    assert (full.strategy.precision, full.strategy.data.zero) == ("bf16", 2)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_beside_an_accelerate_yaml_is_read_alike(name: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(CONFIGS[name])
    text = "distributed_type: DEEPSPEED\nnum_processes: 16\ndeepspeed_config:\n"
    (tmp_path / "a.yaml").write_text(text + "  deepspeed_config_file: ds.json\n")
    found = interop.load(tmp_path / "a.yaml", model="llama-3-8b", gpu=GPU_NAME)
    assert found.plan.strategy.data.zero == 2 and found.plan.training.global_batch == 128


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{a: 1 # one\n b: two words, and a comma\n}", {"a": 1, "b": "two words, and a comma"}),
        ("{a: http://x/y // kept, it is text\n}", {"a": "http://x/y // kept, it is text"}),
        ("{a: 'it\\'s \"x\"', 'b c': null}", {"a": 'it\'s "x"', "b c": None}),
        ("[1 /* x */, -2.5e3,\n0123\n]", [1, -2500.0, "0123"]),
        ("a: '''one\ntwo'''\n", {"a": "one\ntwo"}),
        ("{}", {}),
    ],
)
def test_hjson_has_one_meaning(text: str, value: Any) -> None:
    assert hjson_files.parse(text, "file") == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1,\n "b" 2}', "line 2, column 6: ':' is missing behind the key 'b'"),
        ('{"a": [1, 2', "an array is not closed"),
        ('{"a": {', "an object is not closed"),
        ('{"a": "x\n"}', "a quoted text is not closed on its line"),
        ('{"a": }', "a value is missing before '}'"),
        ("{a: 1 /* x\n", "a comment is not closed"),
        ('{"a": 1} x', "something stands behind the end"),
        ('{"a":' * 5000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "digits"),
        ('{"a": 1, a: 2}', "is written twice"),
    ],
)
def test_what_is_wrong_is_said_by_its_place(text: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        hjson_files.parse(text, "file")
    assert words in str(caught.value)


def test_a_configuration_that_nobody_reads_is_refused_by_its_line() -> None:
    text = '{\n "train_batch_size": 16, // c\n "zero_optimization" {"stage": 1}\n}'
    beside = {"model": "tiny", "gpu": GPU_NAME, "gpus": 16}
    assert "line 3, column" in problems(interop.read, text, **beside)["file"]
