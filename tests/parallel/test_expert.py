"""MoE layers equal one device on every mesh, dropless and with capacity.

A token whose scores of two experts are closer than rounding may be routed differently on another
mesh. That changes gradients by far more than the tolerance, so that it can only fail a
verification, never pass one; in fp64 it does not happen. In fp32 the tests check the margin too: no
choice is closer than what meshes differ by.
"""

from typing import Any

import pytest
from torch import Tensor

from tests.parallel.small import GPT, LLAMA, plan
from tests.parallel.test_equality import assert_equal_to_one_device
from workbench.engine.verify.equivalence import verify
from workbench.models.moe_routing import Router, Routing
from workbench.plan.schema import Plan

MOE: dict[str, Any] = {"experts": 4, "top_k": 2, "ffn": 24, "shared": 1, "first_dense": 1}
MARGIN = 1e-5
"""Of scores, which are at most 1: about a hundred roundings in single precision."""


def moe_plan(
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    expert: int = 1,
    moe: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
    **more: Any,
) -> Plan:
    """A plan of a small MoE on tensor x pipeline x data ranks, experts sharded over `expert`."""
    changes = {"strategy.expert.size": expert, **(changes or {})}
    return plan(
        tensor, pipeline, data, moe=MOE | (moe or {}), changes=changes, microbatches=2, **more
    )


@pytest.mark.parametrize(
    "mesh", [(1, 1, 2, 1), (1, 1, 2, 2), (1, 1, 4, 2), (1, 1, 4, 4), (2, 1, 1, 1)], ids=str
)
def test_fp64_on_every_mesh(mesh: tuple[int, int, int, int]) -> None:
    assert_equal_to_one_device(verify(moe_plan(*mesh), "fp64"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "shape", "tied"),
    [
        ((2, 1, 2, 2), LLAMA, True),
        ((2, 1, 2, 2), GPT, False),
        ((1, 2, 2, 2), LLAMA, True),
        ((1, 2, 4, 4), GPT, True),
        ((2, 2, 2, 2), LLAMA, False),
        ((2, 2, 2, 2), GPT, True),
    ],
    ids=str,
)
def test_fp64_with_tensor_and_pipeline(
    mesh: tuple[int, int, int, int], shape: dict[str, Any], tied: bool
) -> None:
    assert_equal_to_one_device(verify(moe_plan(*mesh, shape=shape, tied=tied), "fp64"))


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    "moe",
    [
        {"top_k": 1},
        {"top_k": 4, "renormalise": False},
        {"shared": 0, "first_dense": 0},
        {"first_dense": 3},
        {"capacity": 1.0},
        {"capacity": 0.5, "top_k": 1},
        {"auxiliary_loss": 0.0},
        {"auxiliary_loss": 1.0},
        {"experts": 6, "shared": 2},
    ],
    ids=str,
)
def test_other_moe_shapes(moe: dict[str, Any]) -> None:
    assert_equal_to_one_device(verify(moe_plan(2, 1, 2, 2, moe=moe), "fp64"))


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ((1, 1, 2, 2), {"strategy.context.size": 2}),
        ((1, 1, 4, 4), {"strategy.context.size": 2, "strategy.context.algorithm": "ulysses"}),
        ((1, 2, 2, 2), {"strategy.pipeline.schedule": "zb-v", "strategy.pipeline.chunks": 2}),
        ((1, 1, 2, 2), {"strategy.recompute": "full"}),
        ((2, 1, 2, 2), {"strategy.tensor.sequence": True}),
        ((1, 1, 4, 2), {"strategy.data.zero": 3}),
        (
            (1, 1, 4, 2),
            {
                "strategy.data.zero": 2,
                "strategy.data.reduce": "microbatch",
                "strategy.data.shard": 2,
            },
        ),
        ((2, 1, 2, 2), {"strategy.data.zero": 1}),
    ],
    ids=str,
)
def test_beside_other_strategies(mesh: tuple[int, int, int, int], changes: dict[str, Any]) -> None:
    heavy = {"auxiliary_loss": 0.5}  # so that what balances experts shows
    assert_equal_to_one_device(verify(moe_plan(*mesh, moe=heavy, changes=changes), "fp64"))


@pytest.mark.parametrize("mesh", [(1, 1, 2, 2), (2, 1, 2, 2), (1, 2, 2, 2)], ids=str)
def test_fp32(mesh: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    margins: list[float] = []
    original = Router.forward

    def forward(self: Router, x_BTD: Tensor) -> Routing:
        scores = (x_BTD @ self.weight.T).detach().softmax(-1).topk(self.moe.top_k + 1).values
        margins.append(float((scores[..., -2] - scores[..., -1]).min()))
        return original(self, x_BTD)

    monkeypatch.setattr(Router, "forward", forward)
    assert_equal_to_one_device(verify(moe_plan(*mesh), "fp32"))
    assert len(margins) >= 9 and min(margins) > MARGIN  # of the one device: layers x steps
