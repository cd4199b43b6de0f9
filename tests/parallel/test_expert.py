"""Mixtures of experts equal one device on every mesh, dropless and with capacity."""

from typing import Any

import pytest

from tests.parallel.small import plan
from tests.parallel.test_equality import assert_equal_to_one_device
from workbench.engine.verify import verify

MOE: dict[str, Any] = {"experts": 4, "top_k": 2, "ffn": 24, "shared": 1, "first_dense": 1}


def mixture(
    tensor: int = 1, pipeline: int = 1, data: int = 1, expert: int = 1, moe: dict[str, Any] | None = None, **more: Any
) -> Any:
    changes = {"strategy.expert.size": expert} | more.pop("changes", {})
    return plan(tensor, pipeline, data, moe=MOE | (moe or {}), changes=changes, microbatches=2, **more)


@pytest.mark.parametrize(
    "mesh",
    [
        (1, 1, 1, 1),
        (1, 1, 2, 1),
        (1, 1, 2, 2),
        (1, 1, 4, 2),
        (1, 1, 4, 4),
        (2, 1, 1, 1),
        (2, 1, 2, 2),
        (1, 2, 2, 2),
        (2, 2, 2, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_fp64_on_every_mesh(mesh: tuple[int, int, int, int], tied: bool) -> None:
    assert_equal_to_one_device(verify(mixture(*mesh, tied=tied), "fp64"))
