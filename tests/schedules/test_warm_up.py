"""1F1B with a warm-up of its own for each rank (DAPPLE's policies, 2007.01045)."""

from __future__ import annotations

import random

import pytest

from workbench.schedules import (
    Table,
    Transport,
    generate,
    in_flight,
    lower,
    names,
    simulate,
    uniform,
    validate,
    warm_up,
)
from workbench.schedules.generators import SCHEDULES
from workbench.schedules.lowering import disorder
from workbench.schedules.named.one_f_one_b import row_with_warm_up


def table(held: list[int], microbatches: int) -> Table:
    rows = tuple(row_with_warm_up(rank, most, microbatches) for rank, most in enumerate(held))
    return Table(rows, len(held), microbatches, tuple(range(len(held))))


def test_a_row_by_hand() -> None:
    row = row_with_warm_up(1, 3, 5)
    assert " ".join(map(str, row)) == "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4"
    assert " ".join(map(str, row_with_warm_up(0, 1, 2))) == "0F0 0B0 0F1 0B1"
    assert " ".join(map(str, row_with_warm_up(0, 9, 2))) == "0F0 0F1 0B0 0B1"


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_policy_a_is_1f1b(ranks: int, microbatches: int) -> None:
    """PA: K_i = S - i."""
    held = [ranks - rank for rank in range(ranks)]
    assert table(held, microbatches).rows == generate("1f1b", ranks, microbatches).rows


@pytest.mark.parametrize("microbatches", [1, 4, 8])
def test_policy_b_holds_almost_twice_as_many(microbatches: int) -> None:
    """PB: K_i = 2 (S - i) - 1."""
    eager = generate("eager-1f1b", 4, microbatches)
    assert eager.rows == table([7, 5, 3, 1], microbatches).rows
    assert in_flight(eager) == tuple(min(microbatches, held) for held in (7, 5, 3, 1))


def timed(name: str, transfer: float, ranks: int = 4) -> float:
    """Seconds of eight microbatches a rank; a forward and a backward take 1 and 2."""
    return simulate(generate(name, ranks, 8 * ranks), uniform(ranks), transfer).makespan


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_policy_b_hides_transfers_up_to_half_of_a_microbatchs_compute(ranks: int) -> None:
    """A transfer that takes t of a microbatch's 3 s: with PB only the first microbatch's way down
    and back counts, 2 (S - 1) t; with PA a rank waits for each round trip, 2 t (S - 1) / S.
    """
    ideal, microbatches = timed("1f1b", 0.0, ranks), 8 * ranks
    assert timed("eager-1f1b", 0.0, ranks) == ideal
    for transfer in (0.25, 1.0, 1.5):
        way = 2 * (ranks - 1) * transfer
        assert timed("eager-1f1b", transfer, ranks) == pytest.approx(ideal + way)
        assert timed("1f1b", transfer, ranks) == pytest.approx(
            ideal + way * microbatches / ranks, rel=0.05
        )
    assert timed("eager-1f1b", 3.0, ranks) > ideal + 2 * (ranks - 1) * 3.0


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b"])
@pytest.mark.parametrize(
    ("most", "held"),
    [
        ([3, 3, 3, 3], {"1f1b": (3, 3, 2, 1), "eager-1f1b": (3, 3, 3, 1)}),
        ([2, 9, 9, 9], {"1f1b": (2, 2, 2, 1), "eager-1f1b": (2, 2, 2, 1)}),
        ([9, 1, 9, 9], {"1f1b": (4, 1, 1, 1), "eager-1f1b": (7, 1, 1, 1)}),
        ([99] * 4, {"1f1b": (4, 3, 2, 1), "eager-1f1b": (7, 5, 3, 1)}),
    ],
)
def test_no_rank_has_more_in_flight_than_it_may_nor_than_the_one_before(
    name: str, most: list[int], held: dict[str, tuple[int, ...]]
) -> None:
    assert warm_up(name, 4, most) == held[name]
    found = generate(name, 4, 9, in_flight=most)
    assert in_flight(found) == held[name] and not validate(lower(found))


def test_as_many_in_flight_as_a_schedule_wants_leave_its_table() -> None:
    assert generate("1f1b", 4, 9, in_flight=[4] * 4) == generate("1f1b", 4, 9)


def test_other_schedules_take_no_number_in_flight() -> None:
    bounded = [name for name in names() if SCHEDULES[name].warm_up]
    assert bounded == ["1f1b", "eager-1f1b"]
    with pytest.raises(ValueError, match=r"'gpipe' has its own .* under: 1f1b, eager-1f1b"):
        generate("gpipe", 2, 4, in_flight=[1, 1])
    for wrong in ([1], [1, 0], [1, 1, 1]):
        with pytest.raises(ValueError, match=r"in_flight = \[.*\]; 2 numbers of at least 1"):
            generate("1f1b", 2, 4, in_flight=wrong)


def test_tables_are_legal_where_no_rank_has_more_than_the_one_before() -> None:
    draw = random.Random(3)
    for _ in range(100):
        held = sorted((draw.randint(1, 12) for _ in range(draw.randint(1, 6))), reverse=True)
        found = table(held, draw.randint(1, 12))
        assert not validate(found)
        assert not validate(lower(found))
    assert "deadlocks" in validate(table([1, 2], 4))[0]


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_receives_posted_early_hide_transfers_of_a_forwards_length(
    transport: Transport, ranks: int
) -> None:
    """Executed, on either backend, as if each transfer were a stage of its own; posted where the
    other schedules' receives are, they hide half of it at most.
    """
    drawn = generate("eager-1f1b", ranks, 8 * ranks)
    early, late = lower(drawn, early=True), lower(drawn)

    def step(table: Table, transfer: float) -> float:
        return simulate(
            table, uniform(ranks), transfer, transport=transport, pair_groups=True
        ).makespan

    for transfer in (0.0, 0.5, 1.0):
        assert step(early, transfer) == simulate(drawn, uniform(ranks), transfer).makespan
    assert step(late, 1.0) > step(early, 1.0) + 2 * ranks


@pytest.mark.parametrize("name", names())
def test_receives_posted_early_deadlock_no_schedule(name: str) -> None:
    schedule = SCHEDULES[name]
    for ranks in (2, 3, 4, 6):
        for per_rank in (2, 3):
            table = generate(name, ranks, per_rank * ranks, schedule.min_chunks)
            found = lower(table, early=True)
            assert not validate(found) and not disorder(found)
            for weight in (0.5, 3.0):
                simulate(found, uniform(table.stages, weight=weight), 0.3, transport="gloo")


def test_a_receive_is_posted_before_the_compute_that_it_followed() -> None:
    drawn = generate("eager-1f1b", 2, 3)
    late, early = (" ".join(map(str, lower(drawn, early=each).rows[0])) for each in (False, True))
    assert late.split("0SEND_F2 ")[1] == "0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2 0REDUCE_GRAD"
    assert early.split("0SEND_F2 ")[1] == "0RECV_B0 0RECV_B1 0B0 0RECV_B2 0B1 0B2 0REDUCE_GRAD"
