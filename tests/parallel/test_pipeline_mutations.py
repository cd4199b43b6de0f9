"""The prover is honest about pipelines: with each of these faults planted, it fails and names a
tensor.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.test_mutations import failure_of
from tests.parallel.test_pipeline import scheduled
from workbench.engine import session as session_module
from workbench.engine.verify.equivalence import verify
from workbench.parallel import apply_strategy
from workbench.parallel.data.zero_shards import ParamAndGradStore
from workbench.parallel.pipeline import schedule_executor as module
from workbench.parallel.pipeline.schedule_executor import Executor, Flight
from workbench.schedules import Action

LINEAR = (".q.", ".k.", ".v.", ".o.", ".gate.", ".up.", ".down.")


def mutate_backward(monkeypatch: pytest.MonkeyPatch, before: Any = None, after: Any = None) -> None:
    original = Executor._backward

    def backward(self: Executor, action: Action, flight: Flight) -> None:
        told = before(self, action, flight) if before else None
        original(self, action, flight)
        if after:
            after(self, action, flight, told)

    monkeypatch.setattr(Executor, "_backward", backward)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_a_dropped_weight_gradient(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def drop(self: Executor, action: Action, flight: Flight) -> None:
        if action.kind == "W" and action.microbatch == 1:
            flight.deferred[action.stage, 1].clear()

    mutate_backward(monkeypatch, drop)
    assert any(part in failure_of(verify(scheduled(name)))["tensor"] for part in LINEAR)


def test_a_forgotten_weight_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    original = module.finish

    def finish(deferred: list[Any], add: Any) -> None:
        del deferred[0]
        original(deferred, add)

    monkeypatch.setattr(module, "finish", finish)
    assert any(part in failure_of(verify(scheduled("zb-h1")))["tensor"] for part in LINEAR)


def test_weight_gradients_of_another_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZB-V's last weight gradients wait side by side: one is taken twice, the other never."""

    def confuse(self: Executor, action: Action, flight: Flight) -> None:
        others = [m for s, m in flight.deferred if s == action.stage and m != action.microbatch]
        waiting = [m for m in others if flight.deferred[action.stage, m]]
        if action.kind == "W" and waiting:
            flight.deferred[action.stage, int(action.microbatch or 0)] = list(
                flight.deferred[action.stage, waiting[0]]
            )

    mutate_backward(monkeypatch, confuse)
    assert any(
        part in failure_of(verify(scheduled("zb-h2", pipeline=3)))["tensor"] for part in LINEAR
    )


def test_weight_gradients_of_another_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def confuse(self: Executor, action: Action, flight: Flight) -> None:
        other = next(
            (queue for (s, _), queue in flight.deferred.items() if s != action.stage and queue),
            None,
        )
        if action.kind == "W" and other is not None:
            flight.deferred[action.stage, int(action.microbatch or 0)] = list(other)

    mutate_backward(monkeypatch, confuse)
    assert any(part in failure_of(verify(scheduled("dualpipe-v")))["tensor"] for part in LINEAR)


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_a_gradient_handed_to_the_wrong_stage(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """At the turn of a V the lower stage gets the gradient that was meant for the upper one."""

    def keep(self: Executor, action: Action, flight: Flight) -> Any:
        return flight.gradients.get((action.stage, int(action.microbatch or 0)))

    def hand_on(self: Executor, action: Action, flight: Flight, given: Any) -> None:
        below = (action.stage - 1, int(action.microbatch or 0))
        if given is not None and self.axis.index == 1 and below in flight.gradients:
            flight.gradients[below] = given

    mutate_backward(monkeypatch, keep, hand_on)
    assert failure_of(verify(scheduled(name)))["tensor"]


def test_an_input_of_the_wrong_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage hands over on its own rank: all microbatches through one buffer."""
    original = Executor._forward

    def forward(self: Executor, action: Action, flight: Flight, *rest: Any) -> None:
        if (held := flight.inputs.get((action.stage, 0))) is not None and action.stage == 2:
            flight.inputs[2, int(action.microbatch or 0)] = held.detach()
        original(self, action, flight, *rest)

    monkeypatch.setattr(Executor, "_forward", forward)
    assert failure_of(verify(scheduled("zb-v")))["tensor"]


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_a_tied_weight_in_a_v_that_is_not_one(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Embedding and head lie on one rank, and each is stepped by its own gradient alone."""
    monkeypatch.setattr(apply_strategy, "_tie", lambda *_: None)
    assert failure_of(verify(scheduled(name, tied=True)))["tensor"] == "embedding.tokens.weight"


def test_a_tied_weight_in_a_v_that_is_not_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ParamAndGradStore.reduce

    def reduce(self: ParamAndGradStore, stage: int) -> None:
        if stage != 0:
            original(self, stage)

    monkeypatch.setattr(ParamAndGradStore, "reduce", reduce)
    assert failure_of(verify(scheduled("zb-v", data=2, tied=True)))["tensor"]


@pytest.mark.parametrize("name", ["interleaved", "zb-h1"])
def test_a_tied_weight_not_summed_across_ranks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(session_module, "sum_tied", lambda gradient, axis, peer: None)
    assert failure_of(verify(scheduled(name, tied=True)))["tensor"] == "embedding.tokens.weight"


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_gradients_reduced_before_the_weights(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each stage is reduced with its last input gradient, when weight gradients are still to
    come.
    """

    def early(self: Executor, action: Action, flight: Flight, told: Any) -> None:
        if action.kind in ("I", "B") and action.microbatch == 3:
            self.hooks.last_backward(action.stage)
            self.hooks.reduce(action.stage)

    original = Executor._run
    monkeypatch.setattr(
        Executor,
        "_run",
        lambda self, row, *rest: original(
            self, [b for b in row if b[0].kind != "REDUCE_GRAD"], *rest
        ),
    )
    mutate_backward(monkeypatch, after=early)
    assert any(part in failure_of(verify(scheduled(name, data=2)))["tensor"] for part in LINEAR)
