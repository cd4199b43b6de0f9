"""Sizes at the edge of what is legal equal one device too."""

from typing import Any

import pytest

from tests.parallel.small import GPT, LLAMA, plan
from workbench.engine.verify.equivalence import verify

CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]] = {
    "one microbatch, four stages": ((1, 4, 1), {}, {"training.global_batch": 2}),
    "fewer microbatches than stages": ((1, 4, 1), {}, {"training.global_batch": 4}),
    "one microbatch of gpipe": (
        (1, 3, 1),
        {},
        {"training.global_batch": 2, "strategy.pipeline.schedule": "gpipe"},
    ),
    "five microbatches, three stages": ((1, 3, 1), {"tied": True}, {"training.global_batch": 10}),
    "one token": ((2, 2, 1), {}, {"training.sequence_length": 1}),
    "one token, one sequence, one device": (
        (1, 1, 1),
        {},
        {"training.sequence_length": 1, "training.global_batch": 1, "training.micro_batch": 1},
    ),
    "a vocabulary that four ranks cannot share evenly": (
        (4, 1, 1),
        {"kv_heads": 4, "vocab": 259, "tied": True},
        {},
    ),
    "two key-value heads on four ranks": ((4, 1, 1), {"kv_heads": 2, "biases": "qkv"}, {}),
    "one key-value head, two stages": ((2, 2, 1), {"kv_heads": 1, "biases": "all"}, {}),
    "eight ranks, every axis, one microbatch": (
        (2, 2, 2),
        {"tied": True},
        {"training.global_batch": 4},
    ),
    "one bucket": ((1, 1, 2), {}, {"strategy.data.bucket_mib": 1000.0}),
    "a bucket a tensor": ((1, 1, 2), {"tied": True}, {"strategy.data.bucket_mib": 1e-6}),
    "tied, two stages, data": ((1, 2, 2), {"tied": True}, {"training.global_batch": 4}),
}


@pytest.mark.slow
@pytest.mark.drawn(8)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
def test_equality(case: str, shape: dict[str, Any]) -> None:
    mesh, more, changes = CASES[case]
    answer = verify(plan(*mesh, shape=shape, changes=changes, **more), "fp64")
    assert answer["passed"], answer
