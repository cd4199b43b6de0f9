"""Whatever stands in a plan file, the answer is a plan that means the same when read back, or a
`PlanError`.
"""

import copy
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.mutation import mutate
from workbench.errors import PlanError
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import Plan, build_plan, parse_plan, written_fields

WRITTEN = [
    written_fields(Plan.of("tiny", gpu="h100-sxm-80gb", gpus=8, strategy="megatron-3d").resolve()),
    written_fields(
        Plan.of("deepseek-v2-lite", gpu="a100-sxm-80gb", gpus=16, strategy="deepseek-v3").resolve()
    ),
    written_fields(Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=64, strategy="zero-3")),
]
VALUES = [
    None,
    0,
    -1,
    1,
    2,
    3,
    5,
    7,
    8,
    10**12,
    1.5,
    math.inf,
    math.nan,
    "",
    "x",
    "auto",
    "all",
    "node",
    "rest",
    [],
    [1],
    [2, 2],
    [0],
    ["a"],
    {},
    {"a": 1},
    True,
    False,
    "1f1b",
    "3e-4",
    [[1]],
    "../../etc",
    "\x00",
    "é" * 300,
]


def test_what_a_mutation_added_may_be_mutated_again() -> None:
    keys, pick = set(), random.Random(0)
    for _ in range(500):
        data = {3: 1}
        mutate(data, pick, VALUES)
        keys |= set(data)
    assert keys == {3, "", "size", "zzz", "3s"}


@pytest.mark.parametrize("seed", range(4))
def test_any_field_may_hold_anything(seed: int) -> None:
    pick, legal = random.Random(seed), 0
    for _ in range(150):
        data = copy.deepcopy(pick.choice(WRITTEN))
        for _ in range(pick.choice([1, 1, 2, 3])):
            mutate(data, pick, VALUES)
        try:
            full = build_plan(data).resolve()
        except PlanError as error:
            assert str(error) and all(problem.message for problem in error.problems)
            continue
        legal += 1
        assert full.resolve() == full == parse_plan(full.to_yaml())
        unsupported(full, "run")
    assert legal, "a test that refuses everything tests nothing"


@given(st.text(max_size=80))
def test_any_text_is_a_plan_or_a_plan_error(text: str) -> None:
    with pytest.raises(PlanError):
        parse_plan(text)
