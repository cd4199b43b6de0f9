"""Whatever stands in a foreign file, the answer is a plan with its notes, or a `PlanError` with a
message.
"""

import copy
import json
import math
import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import examples
from tests.mutation import mutate
from workbench import interop
from workbench.errors import PlanError
from workbench.interop.accelerate import read_accelerate, read_fsdp
from workbench.interop.deepspeed import read_deepspeed
from workbench.interop.foreign_keys import flat
from workbench.interop.gpt_neox import read_gpt_neox
from workbench.interop.megatron import read_megatron
from workbench.interop.torchtitan import read_torchtitan
from workbench.interop.trainer import read_trainer
from workbench.interop.translation import Imported, ImportOptions
from workbench.safe_io import yaml_files

SAMPLES = Path(__file__).parent / "foreign"
GPU_NAME = "h100-sxm-80gb"
TEXTS = {path.name: path.read_text() for path in sorted(SAMPLES.iterdir())}
DATA: dict[str, tuple[Callable[..., Imported], Any, int | None]] = {
    "deepspeed": (read_deepspeed.read, json.loads(TEXTS["ds_config.json"]), 16),
    "megatron": (read_megatron.read, yaml_files.parse(TEXTS["megatron.yaml"]), 16),
    "torchtitan": (read_torchtitan.read, tomllib.loads(TEXTS["torchtitan.toml"]), None),
    "fsdp": (read_fsdp.read, yaml_files.parse(TEXTS["accelerate.yaml"]), None),
    "gpt_neox": (read_gpt_neox.read, yaml_files.parse(TEXTS["gpt_neox.yml"]), 16),
    "accelerate": (
        read_accelerate.read,
        yaml_files.parse(TEXTS["accelerate_deepspeed.yaml"]),
        None,
    ),
    "hf_trainer": (read_trainer.read_hf_trainer, yaml_files.parse(TEXTS["hf_trainer.yaml"]), 16),
    "llama_factory": (
        read_trainer.read_llama_factory,
        yaml_files.parse(TEXTS["llama_factory.yaml"]),
        16,
    ),
    "axolotl": (read_trainer.read_axolotl, yaml_files.parse(TEXTS["axolotl.yml"]), 16),
}
ALL_TOLD = ("deepspeed", "torchtitan", "gpt_neox", "hf_trainer", "llama_factory", "axolotl")
"""Formats whose keys are all in an import's account by their own dotted names."""
VALUES = [
    None,
    0,
    -1,
    1,
    2,
    3,
    7,
    8,
    10**12,
    10**400,
    1.5,
    1e308,
    math.inf,
    math.nan,
    "",
    "x",
    "auto",
    "all",
    [],
    [1],
    [2, 2],
    ["a"],
    {},
    {"a": 1},
    True,
    False,
    "1f1b",
    "3e-4",
    [[1]],
    "\x00",
    "é" * 300,
    "$X",
    "$((2*3))",
    "yes",
    [None],
    {"": 1},
]


@pytest.mark.parametrize("name", DATA)
def test_any_key_may_hold_anything(name: str) -> None:
    pick, read, refused = random.Random(name), 0, 0
    for _ in range(500):
        reader, written, gpus = DATA[name]
        data = copy.deepcopy(written)
        for _ in range(pick.choice([1, 1, 2, 3])):
            mutate(data, pick, VALUES)
        given_beside = ImportOptions(pick.choice(["tiny-moe", "tiny-moe", None]), GPU_NAME, gpus)
        try:
            found = reader(data, given_beside, lenient=pick.random() < 0.5)
        except PlanError as error:
            refused += 1
            assert all(problem.message for problem in error.problems)
            continue
        read += 1
        if name in ALL_TOLD:
            told = {*found.translated, *(note.field for note in found.untranslated)}
            told |= {note.field for note in found.ignored}
            assert {key for key, value in flat(data).items() if value not in (None, {})} <= told
        for format in pick.sample(interop.FORMATS, 1):
            try:
                interop.write(found.plan, format)
            except PlanError as error:
                assert "cannot be written as" in str(error)
    assert read and refused, "a test that refuses or reads everything tests nothing"


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_cut_off_or_with_letters_changed(name: str) -> None:
    pick, text = random.Random(name), TEXTS[name]
    for _ in range(80):
        place = pick.randrange(len(text))
        letters = "".join(pick.choice("{}[]()\"'#=:-\n\\$ xX0") for _ in range(pick.randint(0, 3)))
        changed = text[:place] + (
            letters + text[place + len(letters) :] if pick.random() < 0.8 else ""
        )
        try:
            found = interop.read(
                changed,
                model=pick.choice([None, "tiny"]),
                gpu=GPU_NAME,
                gpus=pick.choice([None, 16]),
            )
        except PlanError as error:
            assert str(error)
            continue
        assert found.plan.resolve()


@settings(max_examples=examples(150), deadline=None)
@given(
    st.text(max_size=60),
    st.sampled_from(
        ["", "--num-layers ", '{"train_batch_size": ', "[training]\n", "distributed_type: "]
    ),
)
def test_any_text_is_a_configuration_or_a_plan_error(text: str, start: str) -> None:
    try:
        interop.read(start + text, model="tiny", gpu=GPU_NAME, gpus=8)
    except PlanError as error:
        assert str(error)


@pytest.mark.parametrize(
    "text",
    [
        "{" * 5000,
        '{"a":' * 5000,
        "[training]\na = " + "[" * 5000,
        "distributed_type: " + "[" * 5000,
        "--num-layers " + "9" * 5000,
        '{"train_batch_size": ' + "9" * 5000 + "}",
        "A=$A --x $A",
        "A='--a $(B' B=(",
        "\x00",
        "--",
        "-- --",
        "{}",
        "[]",
        "[1]",
        '["--num-layers"]',
        "null",
        "[model]\n[training]\n",
    ],
)
def test_odd_texts_are_refused_with_a_message(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        interop.read(text, gpu=GPU_NAME, gpus=8)
    assert str(caught.value)
