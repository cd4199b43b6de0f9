"""Bubbles, activations in flight, lowering and deadlocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import examples
from workbench.schedules import (
    Deadlock,
    Table,
    generate,
    in_flight,
    in_flight_by_stage,
    lower,
    names,
    parse_action,
    simulate,
    table_of,
    uniform,
    validate,
)
from workbench.schedules.generators import SCHEDULES
from workbench.schedules.lowering import disorder


def drawn(*rows: str) -> Table:
    return table_of([[parse_action(cell) for cell in row.split()] for row in rows])


schedules = st.builds(
    generate,
    st.sampled_from(["gpipe", "1f1b", "eager-1f1b"]),
    ranks=st.integers(1, 6),
    microbatches=st.integers(1, 12),
)


@given(schedules, st.floats(0.1, 9), st.floats(0.1, 9))
@settings(max_examples=examples(60), deadline=None)
def test_bubble_is_that_of_the_papers(table: Table, forward: float, backward: float) -> None:
    """(p-1)(F+B) for GPipe and for 1F1B, with any number of microbatches, lowered or not."""
    durations = {"F": [forward] * table.stages, "B": [backward] * table.stages}
    for t in (table, lower(table)):
        timeline = simulate(t, durations)
        assert timeline.bubble == pytest.approx((table.ranks - 1) * (forward + backward))
        assert timeline.busy == pytest.approx(
            [table.microbatches * (forward + backward)] * table.ranks
        )


@given(schedules)
@settings(max_examples=examples(60), deadline=None)
def test_lowering_gives_a_table_that_may_run(table: Table) -> None:
    lowered = lower(table)
    assert validate(table) == [] and validate(lowered) == []
    assert [[a for a in row if a.is_compute] for row in lowered.rows] == [
        list(row) for row in table.rows
    ]
    reductions = [a for row in lowered.rows for a in row if a.kind == "REDUCE_GRAD"]
    assert sorted(a.stage for a in reductions) == list(range(table.stages))
    assert all(row[-1].kind == "REDUCE_GRAD" for row in lowered.rows)
    simulate(lowered, uniform(table.stages), transport="rendezvous")


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_in_flight_is_that_of_the_papers(microbatches: int) -> None:
    assert in_flight(generate("gpipe", 4, microbatches)) == (microbatches,) * 4
    assert in_flight(generate("1f1b", 4, microbatches)) == tuple(
        min(microbatches, 4 - i) for i in range(4)
    )
    assert in_flight(generate("eager-1f1b", 4, microbatches)) == tuple(
        min(microbatches, 2 * (4 - i) - 1) for i in range(4)
    )
    assert in_flight_by_stage(lower(generate("1f1b", 4, microbatches))) == tuple(
        min(microbatches, 4 - i) for i in range(4)
    )


def test_receives_of_a_rank_follow_the_order_of_their_sends() -> None:
    """So that they cannot block each other where a rank's transfers run one after the other."""
    for name in names():
        table = lower(generate(name, 4, 8, SCHEDULES[name].min_chunks))
        assert disorder(table) == []
        simulate(table, uniform(table.stages), transport="rendezvous")


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", names())
def test_on_nccl_schedules_are_within_a_percent_of_their_ideal(name: str, ranks: int) -> None:
    """Transfers of a process group share a stream, compute waits for no send."""
    schedule = SCHEDULES[name]
    table = generate(name, ranks, 4 * ranks, schedule.min_chunks)
    ideal = simulate(table, uniform(table.stages)).makespan
    pairs = schedule.pair_groups
    found = simulate(lower(table), uniform(table.stages), transport="nccl", pair_groups=pairs)
    assert found.makespan <= 1.01 * ideal
    if pairs and ranks > 2:  # a group for each pair of ranks buys something
        seconds = float(name == "eager-1f1b")  # where transfers take time, which it is made for
        one, each = (
            simulate(
                lower(table), uniform(table.stages), seconds, transport="nccl", pair_groups=group
            )
            for group in (False, True)
        )
        assert one.makespan > 1.05 * each.makespan


def test_transfers_take_time() -> None:
    table = generate("1f1b", 4, 8)
    unit = uniform(4)
    assert simulate(table, unit, 0.5).makespan > simulate(table, unit).makespan
    assert simulate(lower(table), unit, 0.5).makespan >= simulate(table, unit, 0.5).makespan


def test_the_slowest_stage_sets_the_pace() -> None:
    durations = {"F": [1, 1, 1, 3], "B": [2, 2, 2, 6]}
    timeline = simulate(lower(generate("1f1b", 4, 16)), durations)
    assert timeline.makespan == pytest.approx(16 * 9 + 3 * 3)
    assert timeline.bubbles[3] < timeline.bubbles[0]


def test_split_backward_holds_activations_until_the_weight_gradient() -> None:
    table = drawn("0F0 0I0 0F1 0I1 0W0 0W1")
    assert in_flight(table) == (2,)
    assert simulate(table, {"F": [1], "I": [1], "W": [1]}).makespan == 6


def test_a_deadlock_names_the_blocked_actions() -> None:
    table = drawn("0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0")
    with pytest.raises(Deadlock, match="rank 0 at 0RECV_B0, rank 1 at 1F0") as error:
        simulate(table, uniform(2))
    assert error.value.blocked == {0: parse_action("0RECV_B0"), 1: parse_action("1F0")}


def test_unsafe_order_deadlocks_only_on_the_strict_transport() -> None:
    """Both ranks send before they receive: buffered sends pass, a rendezvous does not."""
    table = drawn(
        "0F0 0SEND_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0 3RECV_F0",
        "1F0 2F0 2SEND_F0 1RECV_F0 2RECV_B0 2B0 1B0 1SEND_B0",
    )
    with pytest.raises(Deadlock):
        simulate(table, uniform(4), transport="rendezvous")
    assert validate(table)


def test_lowering_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="already has sends"):
        lower(lower(generate("1f1b", 2, 2)))


def test_a_table_without_forward_order_cannot_be_lowered() -> None:
    table = drawn("0F0 0B0 0F1 0B1", "1F1 1F0 1B1 1B0")
    with pytest.raises(Deadlock):
        lower(table)
