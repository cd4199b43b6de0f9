"""Every mesh equals one device: loss, every gradient, and the weights after three steps."""

from typing import Any

import pytest

from tests.parallel.small import GPT, LLAMA, plan
from workbench.engine.verify.equivalence import TOLERANCE, verify

MESHES = [(1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1), (2, 2, 2)]


def assert_equal_to_one_device(answer: dict[str, Any]) -> None:
    assert answer["passed"], answer
    assert max(answer["max_relative_diff"].values()) <= TOLERANCE[answer["precision"]]


@pytest.mark.drawn(8)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "tied",
    [pytest.param(False, id="untied", marks=pytest.mark.slow), pytest.param(True, id="tied")],
)
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
def test_fp64_on_every_mesh(mesh: tuple[int, int, int], shape: dict[str, Any], tied: bool) -> None:
    assert_equal_to_one_device(verify(plan(*mesh, shape=shape, tied=tied), "fp64"))


@pytest.mark.parametrize(
    "mesh",
    [(1, 1, 2), (2, 1, 1), (1, 2, 1), pytest.param((2, 2, 2), marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
def test_fp32(mesh: tuple[int, int, int], shape: dict[str, Any]) -> None:
    assert_equal_to_one_device(verify(plan(*mesh, shape=shape, tied=True), "fp32"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"strategy.pipeline.schedule": "gpipe"},
        {"strategy.pipeline.partition": [3, 1]},
        {"training.global_batch": 2},
        {"strategy.placement": ["pipeline", "data", "context", "tensor"]},
        {"training.optimizer.clip": None},
        {"training.optimizer.name": "sgd"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_pipelines(changes: dict[str, Any]) -> None:
    assert_equal_to_one_device(verify(plan(2, 2, 1, changes=changes), "fp64"))


@pytest.mark.parametrize(
    "more",
    [
        {"mlp": "relu", "norm": "layernorm", "biases": "all"},
        {"mlp": "geglu", "biases": "qkv"},
        {"embedding_norm": True},
        {"head_dim": 12},
        {"vocab": 258, "tied": True},
    ],
    ids=str,
)
def test_other_shapes(more: dict[str, Any]) -> None:
    assert_equal_to_one_device(verify(plan(2, 1, 1, **more), "fp64"))


def test_four_tensor_ranks_with_padding() -> None:
    assert_equal_to_one_device(verify(plan(4, 1, 1, shape=GPT), "fp64"))


def test_three_stages_of_uneven_size() -> None:
    assert_equal_to_one_device(verify(plan(1, 3, 1), "fp64"))


def test_a_key_bias_that_adamw_moves_by_noise_is_no_difference() -> None:
    changes = {"training.optimizer.learning_rate": 1.0, "training.optimizer.clip": None}
    assert_equal_to_one_device(verify(plan(2, 1, 1, shape=GPT, layers=1, changes=changes), "fp64"))
