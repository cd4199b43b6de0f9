"""Tensor grids: 2-D, 2.5-D and 3-D equal one device."""

from typing import Any

import pytest

from tests.parallel.small import GPT, LLAMA, plan
from workbench.engine.verify.equivalence import verify
from workbench.plan.schema import Plan

SQUARE, DEEP, CUBE = ("2d", [2, 2]), ("2.5d", [2, 2, 2]), ("3d", [2, 2, 2])


def on(
    grid: tuple[str, list[int]],
    pipeline: int = 1,
    data: int = 1,
    *,
    shape: dict[str, Any] = LLAMA,
    changes: dict[str, Any] | None = None,
    **more: Any,
) -> Plan:
    algorithm, sides = grid
    ranks = 1
    for side in sides:
        ranks *= side
    how: dict[str, Any] = {"strategy.tensor.algorithm": algorithm, "strategy.tensor.size": sides}
    how |= {
        "training.micro_batch": 4,
        "training.global_batch": 8 * data,
        "cluster.gpus": ranks * pipeline * data,
    }
    return plan(pipeline=pipeline, data=data, shape=shape, changes=how | (changes or {}), **more)


def assert_equal(answer: dict[str, Any]) -> None:
    assert answer["passed"], answer


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("grid", [SQUARE, DEEP, CUBE], ids=lambda grid: grid[0])
def test_fp64(grid: tuple[str, list[int]], shape: dict[str, Any], tied: bool) -> None:
    assert_equal(verify(on(grid, shape=shape, tied=tied, layers=2), "fp64"))


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("grid", "pipeline", "data"),
    [(SQUARE, 2, 1), (SQUARE, 1, 2), (("2.5d", [2, 2, 1]), 2, 1)],
    ids=str,
)
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
def test_with_other_axes(
    grid: tuple[str, list[int]], pipeline: int, data: int, shape: dict[str, Any]
) -> None:
    assert_equal(verify(on(grid, pipeline, data, shape=shape, tied=True), "fp64"))


@pytest.mark.slow
@pytest.mark.parametrize("grid", [SQUARE, DEEP, CUBE], ids=lambda grid: grid[0])
def test_fp32(grid: tuple[str, list[int]]) -> None:
    assert_equal(verify(on(grid, shape=GPT if grid is DEEP else LLAMA, layers=2), "fp32"))


@pytest.mark.slow
@pytest.mark.parametrize("grid", [SQUARE, CUBE], ids=lambda grid: grid[0])
def test_one_key_value_head_padding_and_biases(grid: tuple[str, list[int]]) -> None:
    odd: dict[str, Any] = {
        "layers": 2,
        "kv_heads": 1,
        "biases": "all",
        "vocab": 259,
        "embedding_norm": True,
        "hidden": 36,
        "ffn": 50,
    }
    assert_equal(verify(on(grid, **odd, head_dim=10), "fp64"))
    assert_equal(verify(on(grid, shape=GPT, layers=1, mlp="relu", vocab=261, tied=True), "fp64"))
