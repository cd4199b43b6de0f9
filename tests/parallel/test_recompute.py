"""What is made again equals what was kept, and less is kept."""

from typing import Any

import pytest

from tests.parallel.small import GPT, LLAMA, plan
from tests.parallel.test_context import spread
from tests.parallel.test_equality import assert_equal_to_one_device
from tests.parallel.test_mutations import failure_of
from workbench.engine.verify.equivalence import verify
from workbench.parallel import activation_checkpointing as module

KINDS: list[Any] = ["selective", "full", [1, 2]]


@pytest.mark.parametrize("what", KINDS, ids=str)
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1), (2, 2, 1)], ids=str)
def test_equals_one_device(mesh: tuple[int, int, int], shape: dict[str, Any], what: Any) -> None:
    assert_equal_to_one_device(
        verify(plan(*mesh, shape=shape, changes={"strategy.recompute": what}), "fp64")
    )


@pytest.mark.parametrize("what", KINDS, ids=str)
@pytest.mark.parametrize("algorithm", ["ring", "ulysses"])
def test_with_spread_sequences(algorithm: str, what: Any) -> None:
    assert_equal_to_one_device(
        verify(spread(2, algorithm, changes={"strategy.recompute": what}), "fp64")
    )


def test_a_block_made_again_from_another_input(monkeypatch: pytest.MonkeyPatch) -> None:
    again = module._checkpoint
    monkeypatch.setattr(
        module, "_again", lambda forward, x, *rest: again(forward, x.detach(), *rest)
    )
    assert failure_of(verify(plan(changes={"strategy.recompute": "full"})))["tensor"]


@pytest.mark.parametrize("what", KINDS, ids=str)
@pytest.mark.parametrize("schedule", [("zb-h1", 1), ("zb-v", 2)], ids=str)
def test_under_split_backward(schedule: tuple[str, int], what: Any) -> None:
    changes = {
        "strategy.recompute": what,
        "strategy.pipeline.schedule": schedule[0],
        "strategy.pipeline.chunks": schedule[1],
    }
    assert_equal_to_one_device(verify(plan(1, 2, 1, changes=changes), "fp64"))


@pytest.mark.parametrize("what", KINDS, ids=str)
def test_with_split_sequences(what: Any) -> None:
    changes = {"strategy.recompute": what, "strategy.tensor.sequence": True}
    assert_equal_to_one_device(verify(plan(2, 2, 1, changes=changes), "fp64"))
