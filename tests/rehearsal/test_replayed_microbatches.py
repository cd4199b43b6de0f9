"""A rehearsal that replays microbatches says, byte by byte, what one that runs all of them says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.parallel.small import GPT, LLAMA, plan
from workbench.plan.rank_placement import representative_ranks
from workbench.plan.schedule_table import executed
from workbench.plan.schema import Plan
from workbench.rehearsal import rehearse as module
from workbench.rehearsal.order_check import check_order
from workbench.rehearsal.rehearse import RankSteps, rank_steps
from workbench.rehearsal.replayed_steps import NotAlikeError
from workbench.rehearsal.running_actions import EVERY, RUN_FIRST, actions_that_run
from workbench.rehearsal.symmetric_ranks import followed_ranks
from workbench.schedules.generators import SCHEDULES

MOE = {"experts": 4, "top_k": 2, "ffn": 16}
MICROBATCHES = 8
TWO_LAYERS = {"layers": 2}


def assert_same(written: Plan) -> None:
    """Of the plan's first and last rank, with the operators of a step."""
    full = written.resolve()
    for rank in {0, full.world_size - 1}:
        replayed = rank_steps(full, rank, operators=True)
        run = rank_steps(full, rank, operators=True, run_first=[EVERY])
        assert ordered(replayed.memory) == ordered(run.memory)
        assert ordered(replayed.collectives) == ordered(run.collectives)
        assert replayed.operators == run.operators


def assert_followed(
    written: Plan, monkeypatch: pytest.MonkeyPatch, ranks: list[int] | None = None
) -> None:
    """Ranks whose stages are like another's say what they say where each runs."""
    full = written.resolve()
    followed = followed_ranks(full, ranks or sorted(set(representative_ranks(full).values())))
    ran: list[int] = []

    def counted(*arguments: Any, **more: Any) -> RankSteps:
        ran.append(arguments[1])
        return rank_steps(*arguments, **more)

    monkeypatch.setattr(module, "rank_steps", counted)
    replayed = module.rehearse(written, ranks, operators=True)
    assert followed and not set(followed) & set(ran)
    monkeypatch.setattr(module, "followed_ranks", lambda *_: {})
    run = module.rehearse(written, ranks, operators=True)
    assert ordered(replayed.memory.to_dict("records")) == ordered(run.memory.to_dict("records"))
    calls = replayed.collectives, run.collectives
    assert ordered(calls[0].fillna(0).to_dict("records")) == ordered(
        calls[1].fillna(0).to_dict("records")
    )
    assert replayed.notes == run.notes


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: str(sorted(row.items())))


def under(schedule: str, **changes: Any) -> dict[str, Any]:
    chunks = max(SCHEDULES[schedule].min_chunks, 1)
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return {
        "strategy.pipeline.schedule": schedule,
        "strategy.pipeline.chunks": chunks,
        **{f"strategy.{key}": value for key, value in named.items()},
    }


@pytest.mark.parametrize("pipeline, data", [(2, 1), (1, 2)])
def test_replayed_is_run(pipeline: int, data: int) -> None:
    assert_same(plan(1, pipeline, data, tied=True, microbatches=7))


@pytest.mark.slow
@pytest.mark.drawn(8)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("zero, reduce", [(0, "step"), (1, "step"), (2, "microbatch"), (3, "step")])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shape", [LLAMA, GPT, LLAMA | {"moe": MOE}], ids=["llama", "gpt", "moe"])
def test_so_it_is_of_every_schedule(
    schedule: str, zero: int, reduce: str, recompute: str, shape: dict[str, Any]
) -> None:
    changes = under(schedule, data__zero=zero, data__reduce=reduce, recompute=recompute)
    assert_same(plan(1, 2, 2, shape=shape, microbatches=MICROBATCHES, changes=changes))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
def test_so_it_is_without_a_pipeline(zero: int, shape: dict[str, Any]) -> None:
    changes = {"strategy.data.zero": zero, "strategy.data.reduce": "microbatch"}
    assert_same(plan(1, 1, 2, shape=shape | TWO_LAYERS, microbatches=MICROBATCHES, changes=changes))


@pytest.mark.slow
@pytest.mark.parametrize("most", [3, [7, 1, 1, 1]], ids=str)
def test_so_it_is_after_other_warm_ups(most: int | list[int]) -> None:
    warm_up = {"strategy.pipeline.schedule": "eager-1f1b", "strategy.pipeline.in_flight": most}
    assert_same(plan(1, 4, 1, tied=True, microbatches=11, changes=warm_up))


def test_ranks_whose_stages_are_alike_follow_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_followed(plan(1, 4, microbatches=6, changes=under("zb-h1")), monkeypatch, [1, 2])


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_so_they_do_under_every_schedule(
    schedule: str, zero: int, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = under(schedule, data__zero=zero, data__reduce="step", recompute=recompute)
    shape = LLAMA | {"layers": 4 * changes["strategy.pipeline.chunks"], "moe": MOE}
    assert_followed(plan(1, 4, 2, shape=shape, microbatches=12, changes=changes), monkeypatch)


def test_ranks_whose_stages_differ_follow_none() -> None:
    def followed(**changes: Any) -> dict[int, int]:
        named = {f"strategy.{key.replace('__', '.')}": value for key, value in changes.items()}
        return followed_ranks(
            plan(1, 4, layers=5, microbatches=8, changes=named).resolve(), range(4)
        )

    assert followed(pipeline__partition=[1, 1, 1, 2]) == {2: 1}
    assert followed(pipeline__partition=[1, 1, 2, 1]) == {}
    alike = {"pipeline__partition": [2, 1, 1, 1]}
    assert followed(**alike, recompute=["blocks.2"]) == {}
    assert followed(**alike, recompute=["blocks.2", "blocks.3"]) == {2: 1}


def test_few_microbatches_run_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def counted(*arguments: Any) -> RankSteps:
        tried.append(arguments[3])
        return steps(*arguments)

    steps = module._steps
    monkeypatch.setattr(module, "_steps", counted)
    many = plan(1, 2, 1, microbatches=64).resolve()
    seen: list[tuple[int, int]] = []
    module.rehearse(many, [0], lambda done, of: seen.append((done, of)))
    assert tried == [RUN_FIRST[0]]
    # Forwards and backwards of three microbatches in the first step, of two in the second.
    assert seen == [(done, 10) for done in range(1, 11)]


def test_what_does_not_repeat_itself_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rank_steps(plan(1, 2, 1, microbatches=6).resolve(), 0)

    def never(*_: object) -> Iterator[None]:
        raise NotAlikeError

    monkeypatch.setattr("workbench.rehearsal.replayed_steps.ReplayingExecutor._compare", never)
    assert rank_steps(plan(1, 2, 1, microbatches=6).resolve(), 0).memory == whole.memory


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_order_of_calls_is_checked_in_replayed_ones_too(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = plan(1, 2, 2, microbatches=8, changes=under(schedule))
    replayed = check_order(written)
    monkeypatch.setattr("workbench.rehearsal.order_check.RUN_FIRST", (EVERY,))
    assert replayed == check_order(written) and not replayed.problems


def test_a_row_says_how_much_of_it_runs() -> None:
    table = executed(plan(1, 2, 1, microbatches=64).resolve())[0]
    first, last = (actions_that_run(row, table.stages, steps=2) for row in table.rows)
    assert (first, last) == (2 * (3 + 2), 2 * (4 + 3))
