"""Planted faults in pipelines: `verify` fails with each, and names a tensor."""

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
from workbench.parallel.pipeline.schedule_executor import MicrobatchState, ScheduleExecutor
from workbench.parallel.pipeline.zero_bubble import compute_deferred_weight_grads
from workbench.schedules import Action

LINEAR = (".q.", ".k.", ".v.", ".o.", ".gate.", ".up.", ".down.")


def mutate_backward(monkeypatch: pytest.MonkeyPatch, before: Any = None, after: Any = None) -> None:
    original = ScheduleExecutor._backward

    def backward(self: ScheduleExecutor, action: Action, state: MicrobatchState) -> None:
        kept = before(self, action, state) if before else None
        original(self, action, state)
        if after:
            after(self, action, state, kept)

    monkeypatch.setattr(ScheduleExecutor, "_backward", backward)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_a_dropped_weight_gradient(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def drop(self: ScheduleExecutor, action: Action, state: MicrobatchState) -> None:
        if action.kind == "W" and action.microbatch == 1:
            state.deferred[action.stage, 1].clear()

    mutate_backward(monkeypatch, drop)
    assert any(part in failure_of(verify(scheduled(name)))["tensor"] for part in LINEAR)


def test_a_weight_gradient_that_is_never_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = compute_deferred_weight_grads

    def compute(deferred: list[Any], *accumulate: Any) -> None:
        del deferred[0]
        original(deferred, *accumulate)

    monkeypatch.setattr(module, "compute_deferred_weight_grads", compute)
    assert any(part in failure_of(verify(scheduled("zb-h1")))["tensor"] for part in LINEAR)


@pytest.mark.slow
def test_weight_gradients_of_another_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several microbatches' deferred weight gradients one is computed twice, another never."""

    def confuse(self: ScheduleExecutor, action: Action, state: MicrobatchState) -> None:
        others = [m for s, m in state.deferred if s == action.stage and m != action.microbatch]
        waiting = [m for m in others if state.deferred[action.stage, m]]
        if action.kind == "W" and waiting:
            state.deferred[action.stage, int(action.microbatch or 0)] = list(
                state.deferred[action.stage, waiting[0]]
            )

    mutate_backward(monkeypatch, confuse)
    assert any(
        part in failure_of(verify(scheduled("zb-h2", pipeline=3)))["tensor"] for part in LINEAR
    )


@pytest.mark.slow
def test_weight_gradients_of_another_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def confuse(self: ScheduleExecutor, action: Action, state: MicrobatchState) -> None:
        other = next(
            (queue for (s, _), queue in state.deferred.items() if s != action.stage and queue), None
        )
        if action.kind == "W" and other is not None:
            state.deferred[action.stage, int(action.microbatch or 0)] = list(other)

    mutate_backward(monkeypatch, confuse)
    assert any(part in failure_of(verify(scheduled("dualpipe-v")))["tensor"] for part in LINEAR)


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_a_gradient_passed_to_the_wrong_stage(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """At the turn of a V the lower stage gets the gradient that was meant for the upper one."""

    def keep(self: ScheduleExecutor, action: Action, state: MicrobatchState) -> Any:
        return state.output_gradients.get((action.stage, int(action.microbatch or 0)))

    def pass_wrong(
        self: ScheduleExecutor, action: Action, state: MicrobatchState, given: Any
    ) -> None:
        below = (action.stage - 1, int(action.microbatch or 0))
        if given is not None and self.axis.index == 1 and below in state.output_gradients:
            state.output_gradients[below] = given

    mutate_backward(monkeypatch, keep, pass_wrong)
    assert failure_of(verify(scheduled(name)))["tensor"]


def test_an_input_of_the_wrong_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages on one rank pass all microbatches through one buffer."""
    original = ScheduleExecutor._forward

    def forward(self: ScheduleExecutor, action: Action, state: MicrobatchState, *rest: Any) -> None:
        if (held := state.inputs.get((action.stage, 0))) is not None and action.stage == 2:
            state.inputs[2, int(action.microbatch or 0)] = held.detach()
        original(self, action, state, *rest)

    monkeypatch.setattr(ScheduleExecutor, "_forward", forward)
    assert failure_of(verify(scheduled("zb-v")))["tensor"]


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_a_tied_weight_that_a_v_schedule_unties(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Embedding and head lie on one rank, and each is stepped by its own gradient alone."""
    monkeypatch.setattr(apply_strategy, "_tie_weights", lambda *_: None)
    assert failure_of(verify(scheduled(name, tied=True)))["tensor"] == "embedding.tokens.weight"


def test_a_tied_weight_of_a_v_schedule_that_is_not_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ParamAndGradStore.reduce

    def reduce(self: ParamAndGradStore, stage: int) -> None:
        if stage != 0:
            original(self, stage)

    monkeypatch.setattr(ParamAndGradStore, "reduce", reduce)
    assert failure_of(verify(scheduled("zb-v", data=2, tied=True)))["tensor"]


@pytest.mark.parametrize("name", ["interleaved", "zb-h1"])
def test_a_tied_weight_not_summed_across_ranks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(session_module, "sum_tied_gradient", lambda *_: None)
    assert failure_of(verify(scheduled(name, tied=True)))["tensor"] == "embedding.tokens.weight"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_gradients_reduced_before_the_weights(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each stage is reduced with its last input gradient, when weight gradients are still to
    come.
    """

    def early(self: ScheduleExecutor, action: Action, state: MicrobatchState, kept: Any) -> None:
        if action.kind in ("I", "B") and action.microbatch == 3:
            self.hooks.expect_last_backward(action.stage)
            self.hooks.reduce(action.stage)

    original = ScheduleExecutor._run
    monkeypatch.setattr(
        ScheduleExecutor,
        "_run",
        lambda self, row, *rest: original(
            self, tuple(a for a in row if a.kind != "REDUCE_GRAD"), *rest
        ),
    )
    mutate_backward(monkeypatch, after=early)
    assert any(part in failure_of(verify(scheduled(name, data=2)))["tensor"] for part in LINEAR)
