"""1F1B with a warm-up of its own for each rank (DAPPLE's policies, 2007.01045)."""

from __future__ import annotations

import random

import pytest

from workbench.schedules import Table, generate, in_flight, lower, validate
from workbench.schedules.one_f_one_b import row_with_warm_up


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


def test_policy_b_holds_almost_twice_as_many() -> None:
    """PB: K_i = 2 (S - i) - 1."""
    assert in_flight(table([7, 5, 3, 1], 8)) == (7, 5, 3, 1)
    assert in_flight(table([7, 5, 3, 1], 4)) == (4, 4, 3, 1)


def test_tables_are_legal_where_no_rank_has_more_than_the_one_before() -> None:
    draw = random.Random(3)
    for _ in range(100):
        held = sorted((draw.randint(1, 12) for _ in range(draw.randint(1, 6))), reverse=True)
        found = table(held, draw.randint(1, 12))
        assert not validate(found)
        assert not validate(lower(found))
    assert "deadlocks" in validate(table([1, 2], 4))[0]
