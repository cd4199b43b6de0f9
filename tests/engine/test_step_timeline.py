"""Timelines of steps: spans follow each other, waits are spans of their own, a bubble is seen."""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from workbench.engine.measure.recorded_collective import tensors_in
from workbench.engine.measure.step_sampler import StepSampler
from workbench.engine.measure.step_timeline import StepTimeline
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

SLOW = 0.08
"""Seconds that the slow stage sleeps in each forward."""
Rows = list[dict[str, Any]]
FOR_A_STAGE = ("WAIT_RECV", "WAIT_SEND")
"""Waits for another stage: gloo's sends, too, are waited for."""


def plan(strategy: str, gpus: int, **changes: Any) -> ResolvedPlan:
    written: dict[str, Any] = {
        "training.sequence_length": 16,
        "training.global_batch": 8,
        "training.micro_batch": 1,
        "strategy.precision": "fp32",
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return Plan.of("tiny", gpu="local", gpus=gpus, strategy=strategy, set=written).resolve()


def timed(full: ResolvedPlan, slow: int | None, rank: int) -> tuple[Rows, Rows, Rows]:
    """Timeline, collectives of the timed step, and collectives of a step under the sampler."""
    mesh = build_mesh(full, rank)
    session = Session.build(full, mesh, torch.device("cpu"))
    shape = (full.num_microbatches, full.training.micro_batch, full.training.sequence_length)
    batch = [torch.zeros(shape, dtype=torch.long) for _ in range(2)]
    session.step(0, batch[0], batch[1])  # the first may reduce later than the others
    sampler = StepSampler(session, None)
    with sampler.step():
        session.step(1, batch[0], batch[1], sampler)
    if slow == mesh["pipeline"].index:
        for stage in session.part.stages.values():
            stage.register_forward_pre_hook(_sleep)
    timeline = StepTimeline(session)
    with timeline.step():
        session.step(2, batch[0], batch[1], timeline)
    return timeline.timeline_rows(), timeline.collective_rows(), sampler.collective_rows()


def _sleep(module: nn.Module, inputs: object) -> None:
    time.sleep(SLOW)


def total(rows: Rows, *names: str) -> float:
    return float(sum(row["end"] - row["start"] for row in rows if row["action"] in names))


def covered(rows: Rows) -> None:
    """Spans begin at 0, and each where the one before it ends."""
    assert rows[0]["start"] == 0
    for one, following in pairwise(rows):
        assert one["start"] < one["end"] == following["start"]


@pytest.fixture(scope="module")
def bubble() -> list[tuple[Rows, Rows, Rows]]:
    """Two stages of four microbatches, the second of which is slow."""
    full = plan("dapple", 2, training__global_batch=4)
    return run_ranks(2, partial(timed, full, 1))


def test_the_wait_for_a_slow_stage_is_a_span_of_the_other(
    bubble: list[tuple[Rows, Rows, Rows]],
) -> None:
    (fast, _, _), (slow, _, _) = bubble
    for rows in (fast, slow):
        covered(rows)
        assert [row["microbatch"] for row in rows if row["action"] == "F"] == [0, 1, 2, 3]
    planted = 4 * SLOW
    waited = total(fast, *FOR_A_STAGE)
    assert total(slow, "F") >= planted
    assert 0.8 * planted <= waited <= slow[-1]["end"]
    # The stage that waits has computed little: its bubble is no compute.
    assert total(fast, "F", "B") < waited


def test_compute_begins_after_the_wait_for_its_input(bubble: list[tuple[Rows, Rows, Rows]]) -> None:
    rows = bubble[0][0]
    backwards = [i for i, row in enumerate(rows) if row["action"] == "B"]
    assert len(backwards) == 4  # no sliver of B stands before its wait
    before = [rows[i - 1] for i in backwards]
    assert sum(row["action"] in FOR_A_STAGE for row in before) >= 3
    assert [row["microbatch"] for row in before if row["action"] in FOR_A_STAGE]


@pytest.mark.parametrize(
    "strategy",
    [
        "dapple",
        pytest.param("zero-3", marks=pytest.mark.slow),
        pytest.param("megatron-tp", marks=pytest.mark.slow),
        pytest.param("ring-attention", marks=pytest.mark.slow),
    ],
)
def test_the_collectives_of_a_timed_step_are_those_of_a_sampled_one(strategy: str) -> None:
    for rows, calls, sampled in run_ranks(2, partial(timed, plan(strategy, 2), None)):
        covered(rows)
        assert by_call(calls) == by_call(sampled)
        assert all(row["seconds"] > 0 for row in calls), calls


def by_call(rows: Rows) -> dict[tuple[Any, ...], int]:
    names = ("axis", "kind", "group_size", "dtype", "bytes", "action")
    found: dict[tuple[Any, ...], int] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        found[key] = found.get(key, 0) + row["count"]
    return found


def test_c10d_is_as_before_after_a_timed_step() -> None:
    before = dict(vars(dist.ProcessGroup)), vars(dist.Work)["wait"]
    (_,) = run_ranks(1, partial(timed, plan("single", 1), None))
    assert (dict(vars(dist.ProcessGroup)), vars(dist.Work)["wait"]) == before
    assert list(tensors_in(None)) == []
