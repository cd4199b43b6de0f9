"""Every way of sharding data parallelism equals one device, alone and with the other axes."""

from typing import Any

import pytest

from tests.parallel.small import GPT, LLAMA, plan
from tests.parallel.test_equality import assert_equal_to_one_device
from workbench.engine.verify.equivalence import verify
from workbench.plan.schema import Plan

SHAPES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt": GPT,
    "gpt tied": {**GPT, "tied": True},
    "tied with a norm": {**LLAMA, "tied": True, "embedding_norm": True},
}

HALF: dict[str, Any] = {"offload_ratio": 0.5, "bucket_mib": 0.01}
CASES: list[tuple[tuple[int, int, int], str, int, dict[str, Any]]] = [
    ((1, 1, 2), "llama", 4, {"zero": 1}),
    ((1, 1, 2), "gpt tied", 1, {"zero": 1, "offload": "optimizer"}),
    ((1, 1, 2), "gpt", 4, {"zero": 2, "reduce": "microbatch"}),
    ((1, 1, 2), "llama", 1, {"zero": 2, "reduce": "step", "offload": "optimizer"}),
    ((1, 1, 2), "gpt tied", 4, {"zero": 3, "reduce": "microbatch"}),
    ((1, 1, 2), "tied with a norm", 4, {"zero": 3, "reduce": "step", "keep_gathered": True}),
    (
        (1, 1, 2),
        "tied with a norm",
        2,
        {"zero": 3, "reduce": "microbatch", "offload": "parameters"},
    ),
    ((1, 1, 4), "gpt", 1, {"zero": 3, "offload": "optimizer", "keep_gathered": True}),
    ((1, 1, 4), "llama", 2, {"zero": 1, "shard": 2}),
    ((1, 1, 4), "gpt tied", 2, {"zero": 2, "shard": 2, "reduce": "microbatch"}),
    ((1, 1, 4), "llama", 2, {"zero": 3, "shard": 2, "reduce": "microbatch"}),
    ((1, 1, 2), "llama", 2, {"zero": 3, "shard": 1}),
    ((1, 1, 2), "tied with a norm", 2, {"zero": 3, "reduce": "microbatch", "in_flight": 1}),
    ((1, 1, 2), "gpt tied", 2, {"zero": 3, "reduce": "microbatch", "in_flight": 3}),
    ((1, 1, 4), "llama", 2, {"zero": 2, "shard": 2, "reduce": "microbatch", "in_flight": 1}),
    ((1, 1, 2), "llama", 3, {"zero": 3, "reduce": "microbatch", "tile_factor": 4}),
    ((1, 1, 4), "gpt tied", 2, {"zero": 3, "shard": 2, "tile_factor": 8, "in_flight": 1}),
    ((2, 1, 2), "gpt tied", 2, {"zero": 1}),
    ((2, 1, 2), "llama", 2, {"zero": 3, "reduce": "microbatch"}),
    ((1, 2, 2), "gpt tied", 2, {"zero": 1, "offload": "optimizer"}),
    ((1, 2, 2), "llama", 2, {"zero": 2, "reduce": "microbatch"}),
    ((1, 2, 2), "gpt tied", 4, {"zero": 3, "reduce": "microbatch", "offload": "parameters"}),
    ((1, 2, 2), "llama", 2, {"zero": 3, "reduce": "step"}),
    ((2, 2, 2), "gpt tied", 2, {"zero": 3, "reduce": "step"}),
    *(
        (mesh, shape, microbatches, {"offload": "optimizer"} | data)
        for mesh, shape, microbatches, data in [
            ((1, 1, 1), "gpt tied", 3, {"zero": 2, "reduce": "microbatch"}),
            ((1, 1, 2), "gpt", 3, {"zero": 2, "reduce": "microbatch", "bucket_mib": 0.01}),
            ((1, 1, 4), "llama", 3, {"zero": 2, "shard": 2, "reduce": "microbatch"}),
            ((2, 1, 2), "gpt tied", 2, {"zero": 3, "reduce": "microbatch", "in_flight": 1}),
            ((1, 2, 2), "gpt tied", 2, {"zero": 2, "reduce": "microbatch"}),
            ((1, 1, 2), "llama", 2, {**HALF, "zero": 1}),
            ((1, 1, 2), "gpt tied", 3, {**HALF, "zero": 2, "reduce": "microbatch"}),
            ((2, 1, 2), "llama", 2, {**HALF, "zero": 3, "reduce": "microbatch"}),
        ]
    ),
]
DELAYED: list[tuple[tuple[int, int, int], str, int, dict[str, Any]]] = [
    ((1, 1, 1), "gpt tied", 2, {"zero": 2, "reduce": "microbatch", "offload": "optimizer"}),
    ((1, 1, 2), "llama", 2, {"zero": 3, "reduce": "microbatch", "offload": "parameters"}),
    ((1, 2, 2), "gpt tied", 2, {"zero": 1, "offload": "optimizer"}),
    ((1, 1, 4), "llama", 1, {"zero": 3, "shard": 2, "offload": "optimizer"}),
]


def sharded(
    mesh: tuple[int, int, int], shape: str, microbatches: int, data: dict[str, Any], **changes: Any
) -> Plan:
    changes |= {f"strategy.data.{field}": value for field, value in data.items()}
    return plan(*mesh, shape=SHAPES[shape], microbatches=microbatches, changes=changes)


@pytest.mark.slow
@pytest.mark.drawn(10)
@pytest.mark.parametrize(
    ("mesh", "shape", "microbatches", "data"), CASES, ids=lambda value: str(value)
)
def test_fp64(
    mesh: tuple[int, int, int], shape: str, microbatches: int, data: dict[str, Any]
) -> None:
    assert_equal_to_one_device(verify(sharded(mesh, shape, microbatches, data), "fp64"))


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize(("mesh", "shape", "microbatches", "data"), DELAYED, ids=str)
def test_a_delayed_update_equals_one_device_that_delays_it(
    mesh: tuple[int, int, int], shape: str, microbatches: int, data: dict[str, Any]
) -> None:
    late = sharded(mesh, shape, microbatches, data, **{"training.optimizer.delayed_update": True})
    assert_equal_to_one_device(verify(late, "fp64"))


@pytest.mark.parametrize(
    ("mesh", "shape", "microbatches", "data"), [CASES[2], CASES[6], CASES[21]], ids=str
)
def test_fp32(
    mesh: tuple[int, int, int], shape: str, microbatches: int, data: dict[str, Any]
) -> None:
    assert_equal_to_one_device(verify(sharded(mesh, shape, microbatches, data), "fp32"))


@pytest.mark.parametrize("zero", [1, 2])
def test_one_bucket_per_tensor(zero: int) -> None:
    data = {"zero": zero, "bucket_mib": 1e-6}
    assert_equal_to_one_device(verify(sharded((1, 1, 2), "gpt tied", 2, data), "fp64"))
