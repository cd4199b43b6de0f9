"""Training under plans of every strategy leaves alone what collectives in flight use."""

import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from tests.parallel.small import plan
from tests.parallel.sweep import MOE, Choice, compile_once, covering_choices, draw_choice, plan_of
from tests.sanitizer.async_sanitizer import AsyncSanitizer
from tests.sanitizer.sanitized_ranks import Transport, violations
from workbench.parallel.async_collectives import WaitFn, start_collective
from workbench.parallel.context import ring_attention
from workbench.parallel.context.context_collectives import wait_ring_transfer
from workbench.parallel.data import gradient_reduction, sharded_params
from workbench.parallel.data.data_collectives import start_all_gather, start_all_reduce
from workbench.parallel.expert import expert_collectives
from workbench.parallel.pipeline.schedule_executor import ScheduleExecutor
from workbench.parallel.tensor import column_parallel
from workbench.plan.schema import Plan

MESHES = ((2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (1, 1, 1, 4), (2, 2, 1, 1))

FEW = ((2, 1, 1, 2), (1, 2, 2, 1), (1, 1, 1, 4))
"""Of the sizes of tensor, context, pipeline and data; together every axis, in seconds."""
SHORT: dict[str, Any] = {"layers": 2, "microbatches": 2}


def drawn_choices(seed: int, meshes: tuple[tuple[int, ...], ...]) -> Iterator[Choice]:
    """A legal choice on each mesh, the rest drawn; kernels are eager, which need no compilation."""
    generator = random.Random(seed)
    for mesh in meshes:
        while True:
            choice = draw_choice(generator, {"mesh": mesh, "kernels": "eager"})
            if plan_of(choice) is not None:
                yield choice
                break


def violations_of(choice: Choice, transport: Transport = "nccl") -> str:
    """What the sanitizer reports of a choice, in lines; empty if nothing."""
    found = plan_of(choice)
    assert found is not None
    return "\n".join(f"{choice}: {each}" for each in violations(found, transport))


@pytest.mark.parametrize("choice", list(drawn_choices(0, FEW)), ids=lambda c: str(c["mesh"]))
def test_drawn_plans_leave_collectives_in_flight_alone(choice: Choice) -> None:
    assert not violations_of(choice)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("times", [1, pytest.param(4, marks=pytest.mark.sweep)])
def test_more_drawn_plans_leave_collectives_in_flight_alone(times: int) -> None:
    choices = list(drawn_choices(1, MESHES * times))
    assert len(choices) == 5 * times
    assert not "\n".join(filter(None, map(violations_of, choices)))


@pytest.mark.slow  # "not slow" leaves it out too
@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", ["nccl", "gloo"])
def test_every_pair_of_values_leaves_collectives_in_flight_alone(transport: Transport) -> None:
    choices = covering_choices(seed=0)
    assert len(choices) > 50, "the space has shrunk"
    compile_once()
    reported = (violations_of(choice, transport) for choice in choices)
    assert not "\n".join(filter(None, reported))


def untold(wait: Callable[..., Any]) -> Callable[..., Any]:
    """`wait`, of which the sanitizer is not told: to it, the wait is dropped.

    gloo is waited for all the same: ranks that went on with garbage would not get to their end.
    """

    def waited(*args: Any) -> Any:
        with mock.patch.object(AsyncSanitizer, "_end", lambda self, pending: None):
            return wait(*args)

    return waited


def never_waits(start: Callable[..., WaitFn | None]) -> Callable[..., Any]:
    """`start`, whose collective is waited for at once, untold, and never again."""

    def started(*args: Any) -> WaitFn | None:
        wait = start(*args)
        if wait is None:
            return None
        untold(wait)()
        return lambda: None

    return started


def drop_all_reduce_of_gradients(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(gradient_reduction, "start_all_reduce", never_waits(start_all_reduce))
    return plan(data=2, **SHORT)


def drop_all_gather_of_parameters(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(sharded_params, "start_all_gather", never_waits(start_all_gather))
    return plan(data=2, changes={"strategy.data.zero": 3}, **SHORT)


def drop_reduction_of_input_gradients(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(column_parallel, "start_collective", never_waits(start_collective))
    return plan(2, **SHORT)


def drop_ring_transfer(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(ring_attention, "wait_ring_transfer", untold(wait_ring_transfer))
    context = {"size": 2, "algorithm": "ring"}
    changes = {f"strategy.context.{name}": value for name, value in context.items()}
    return plan(changes={**changes, "cluster.gpus": 2}, **SHORT)


def drop_all_to_all(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(expert_collectives, "run_collective", never_waits(start_collective))
    return plan(data=2, shape=MOE, changes={"strategy.expert.size": 2}, **SHORT)


def drop_receive(monkeypatch: pytest.MonkeyPatch) -> Plan:
    original = ScheduleExecutor._wait_receive
    monkeypatch.setattr(ScheduleExecutor, "_wait_receive", untold(original))
    return plan(pipeline=2, **SHORT)


DROPPED = {
    "ddp": (drop_all_reduce_of_gradients, "all_reduce", "gradient_reduction.py"),
    "zero-3": (drop_all_gather_of_parameters, "all_gather", "sharded_params.py"),
    "megatron-tp": (drop_reduction_of_input_gradients, "all_reduce", "column_parallel.py"),
    "ring": (drop_ring_transfer, "recv", "ring_attention.py"),
    "expert": (drop_all_to_all, "all_to_all", "expert_collectives.py"),
    "1f1b": (drop_receive, "recv", "schedule_executor.py"),
}


@pytest.mark.parametrize("strategy", DROPPED)
def test_a_dropped_wait_is_reported(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drop, collective, file = DROPPED[strategy]
    found = violations(drop(monkeypatch))
    early = [each for each in found if each.kind in ("reads", "writes", "resizes")]
    assert {each.rank for each in early} == {0, 1}, "\n".join(map(str, found))
    assert {each.collective for each in early} == {collective}
    assert strategy != "zero-3" or "resizes" in {each.kind for each in early}
    assert all(file in each.collective_line for each in early)
    assert all(file in each.collective_line for each in found if each.kind == "never waits")


def test_a_send_that_is_not_waited_for_within_its_step_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ScheduleExecutor, "_wait_sends", untold(ScheduleExecutor._wait_sends))
    found = violations(plan(pipeline=2, **SHORT))
    assert {(each.kind, each.collective, each.rank) for each in found} >= {
        ("never waits", "send", 0),
        ("never waits", "send", 1),
    }
    assert {each.collective for each in found} == {"send"}
