"""Sequence parallelism: norms and residuals on a part of the tokens equal one device."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.small import GPT, LLAMA, plan
from workbench.engine.verify.equivalence import verify
from workbench.parallel import apply_strategy
from workbench.parallel.tensor.column_parallel import ColumnParallelBackward
from workbench.plan.schema import Plan

SEQUENCE = {"strategy.tensor.sequence": True}


def on(
    *mesh: int, shape: dict[str, Any] = LLAMA, changes: dict[str, Any] | None = None, **more: Any
) -> Plan:
    return plan(*mesh, shape=shape, changes=SEQUENCE | (changes or {}), **more)


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize("mesh", [(2, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
def test_sequence_parallel_equals_one_device_in_fp64(
    mesh: tuple[int, int, int], shape: dict[str, Any]
) -> None:
    answer = verify(on(*mesh, shape=shape, tied=shape is GPT), "fp64")
    assert answer["passed"], answer


@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
def test_sequence_parallel_equals_one_device_in_fp32(shape: dict[str, Any]) -> None:
    answer = verify(on(2, 2, 1, shape=shape, tied=shape is LLAMA), "fp32")
    assert answer["passed"], answer


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"kv_heads": 2, "biases": "qkv"},
        {"kv_heads": 1, "biases": "all", "embedding_norm": True, "vocab": 259},
        {"positions": "learned", "max_positions": 16, "norm": "layernorm", "tied": True},
    ],
    ids=str,
)
def test_sequence_parallel_on_four_ranks(more: dict[str, Any]) -> None:
    answer = verify(on(4, 1, 1, **more), "fp64")
    assert answer["passed"], answer


@pytest.mark.slow
def test_sequence_parallel_with_context_parallel() -> None:
    answer = verify(on(2, 1, 2, changes={"strategy.context.size": 2}, shape=GPT), "fp64")
    assert answer["passed"], answer


def failing(answer: dict[str, Any]) -> dict[str, Any]:
    assert not answer["passed"], answer
    worst: dict[str, Any] = answer["worst"]
    assert worst["relative"] > 100 * answer["tolerance"]
    return worst


def test_norm_gradients_not_all_reduced_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        apply_strategy,
        "tensor_reduction_axes",
        lambda layouts, plan, mesh: {name: () for name, _ in layouts},
    )
    assert "norm" in failing(verify(on(2)))["tensor"]


def test_positions_of_other_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(axis: Any, module: Any, inputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        tokens, positions = inputs
        own = positions.indices.expand(tokens.shape).flatten().chunk(axis.size)[0]
        return tokens, positions._replace(indices=own.view(len(tokens), -1))

    monkeypatch.setattr("workbench.parallel.tensor.apply_tensor.shard_positions", first)
    assert failing(verify(on(4, shape=GPT)))["tensor"]


def test_tokens_not_all_gathered_in_backward_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def repeated(self: ColumnParallelBackward, x_BTD: Tensor) -> None:
        self.input = torch.cat([x_BTD.flatten(0, -2)] * self.axis.size)

    monkeypatch.setattr(ColumnParallelBackward, "start_gather", repeated)
    worst = failing(verify(on(2)))
    assert worst["kind"] in ("gradients", "weights") and worst["tensor"] != "loss"
