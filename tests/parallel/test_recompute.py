"""Activation checkpointing: what is recomputed in backward equals what forward computed."""

from typing import Any

import pytest
from torch import Tensor

from tests.parallel.small import GPT, LLAMA, plan
from tests.parallel.test_context import context_plan
from tests.parallel.test_equality import assert_equal_to_one_device
from tests.parallel.test_mutations import failure_of
from workbench.engine.verify.equivalence import verify
from workbench.parallel import activation_checkpointing as module
from workbench.parallel.activation_offload import ActivationOffload

KINDS: list[Any] = ["selective", "full", [1, 2]]


@pytest.mark.slow
@pytest.mark.drawn(6)
@pytest.mark.parametrize("what", KINDS, ids=str)
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1), (2, 2, 1)], ids=str)
def test_recompute_equals_one_device(
    mesh: tuple[int, int, int], shape: dict[str, Any], what: Any
) -> None:
    assert_equal_to_one_device(
        verify(plan(*mesh, shape=shape, changes={"strategy.recompute": what}), "fp64")
    )


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize("what", KINDS, ids=str)
@pytest.mark.parametrize(("ranks", "algorithm"), [(2, "ring"), (2, "ulysses"), (4, "usp")])
def test_recompute_with_context_parallel(ranks: int, algorithm: str, what: Any) -> None:
    assert_equal_to_one_device(
        verify(context_plan(ranks, algorithm, changes={"strategy.recompute": what}), "fp64")
    )


OFFLOADED = {"strategy.recompute": "full", "strategy.offload_activations": True}


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ((1, 1, 1), {}),
        ((1, 1, 2), {"strategy.data.zero": 3, "strategy.data.offload": "parameters"}),
        ((2, 1, 1), {"strategy.tensor.sequence": True}),
        ((1, 2, 1), {"strategy.pipeline.schedule": "zb-h1"}),
        ((1, 2, 2), {"strategy.pipeline.schedule": "interleaved", "strategy.pipeline.chunks": 2}),
        ((1, 1, 2), {"strategy.recompute": [1, 2], "training.dropout": 0.1}),
    ],
    ids=str,
)
def test_offloaded_inputs_equal_one_device(
    mesh: tuple[int, int, int], changes: dict[str, Any]
) -> None:
    made = plan(*mesh, shape=LLAMA, microbatches=4, changes={**OFFLOADED, **changes})
    assert_equal_to_one_device(verify(made, "fp64"))


def test_an_overwritten_input_in_host_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = ActivationOffload._pack

    def overwritten(self: ActivationOffload, x: Tensor) -> Any:
        kept = pack(self, x)
        kept._buffer.zero_()
        return kept

    monkeypatch.setattr(ActivationOffload, "_pack", overwritten)
    assert failure_of(verify(plan(changes=OFFLOADED)))["tensor"]


def test_recomputing_a_block_from_a_detached_input_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = module._checkpoint
    monkeypatch.setattr(
        module, "_checkpoint", lambda forward, x, *rest: checkpoint(forward, x.detach(), *rest)
    )
    assert failure_of(verify(plan(changes={"strategy.recompute": "full"})))["tensor"]


@pytest.mark.parametrize("what", KINDS, ids=str)
@pytest.mark.parametrize("schedule", [("zb-h1", 1), ("zb-v", 2)], ids=str)
def test_recompute_under_a_split_backward(schedule: tuple[str, int], what: Any) -> None:
    changes = {
        "strategy.recompute": what,
        "strategy.pipeline.schedule": schedule[0],
        "strategy.pipeline.chunks": schedule[1],
    }
    assert_equal_to_one_device(verify(plan(1, 2, 1, changes=changes), "fp64"))


@pytest.mark.parametrize("what", KINDS, ids=str)
def test_recompute_with_sequence_parallel(what: Any) -> None:
    changes = {"strategy.recompute": what, "strategy.tensor.sequence": True}
    assert_equal_to_one_device(verify(plan(2, 2, 1, changes=changes), "fp64"))
