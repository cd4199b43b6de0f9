"""Bubble and activations in flight of the papers, and tables that run for every legal number."""

from __future__ import annotations

import pytest

from workbench.schedules import (
    Table,
    Timeline,
    generate,
    in_flight,
    lower,
    names,
    simulate,
    uniform,
    validate,
)

LOWERED = {"interleaved": 1.12, "dualpipe-v": 1.12, "zb-v": 1.12, "zb-h2": 1.12}
"""Makespan after lowering over before, at most: both ends of a transfer must meet. The others lose
nothing.
"""
CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}
FILLED = [(2, 4), (2, 7), (3, 6), (4, 8), (4, 13), (5, 20), (8, 16), (8, 31)]


def drawn(name: str, ranks: int, microbatches: int) -> Table:
    return generate(name, ranks, microbatches, CHUNKS.get(name, 1))


def timed(table: Table, forward: float, input: float, weight: float) -> Timeline:
    """Seconds of one microbatch on a whole rank, shared by its chunks."""
    chunks = table.stages // table.ranks
    return simulate(table, uniform(table.stages, forward / chunks, input / chunks, weight / chunks))


def test_the_check_line() -> None:
    """p = 4, m = 8, F = I = W = 1: ZB1P 3, ZB-V 1.5, DualPipe-V 1.5; in flight by stage of 1F1B and
    interleaved.
    """
    bubbles = {
        name: timed(drawn(name, 4, 8), 1, 1, 1).bubble for name in ("zb-h1", "zb-v", "dualpipe-v")
    }
    assert bubbles == {"zb-h1": 3, "zb-v": 1.5, "dualpipe-v": 1.5}
    assert in_flight(drawn("1f1b", 4, 8)) == (4, 3, 2, 1)
    assert in_flight(drawn("interleaved", 4, 8)) == (11, 9, 7, 5)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 6), (4, 8), (4, 12), (8, 16)])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved(p: int, m: int, chunks: int) -> None:
    """(p-1)/(Vm) of ideal; 2(p-i-1) + (V-1)p + 1 chunks (2104.04473), never more than there are."""
    table = generate("interleaved", p, m, chunks)
    assert timed(table, 1.0, 1.2, 0.9).bubble == pytest.approx((p - 1) / (chunks * m) * m * 3.1)
    expected = tuple(min(chunks * m, 2 * (p - i - 1) + (chunks - 1) * p + 1) for i in range(p))
    assert in_flight(table) == expected


@pytest.mark.parametrize(("p", "m"), FILLED)
def test_zb_h1(p: int, m: int) -> None:
    """(p-1)(F+I-W), at most p in flight (2401.10241)."""
    table = drawn("zb-h1", p, m)
    assert timed(table, 1.0, 1.1, 0.8).bubble == pytest.approx((p - 1) * (1.0 + 1.1 - 0.8))
    assert in_flight(table) == (p,) * p


@pytest.mark.parametrize(("p", "m"), FILLED)
def test_zb_h2(p: int, m: int) -> None:
    """Own span 0 at F = I = W, else (p-1)(F+I-2W); (p-1)F to the common end; at most 2p-1 in flight
    (2401.10241).
    """
    table = drawn("zb-h2", p, m)
    equal, unequal = timed(table, 1, 1, 1), timed(table, 1.0, 1.0, 0.75)
    assert equal.own_bubbles == (0,) * p and equal.bubble == p - 1
    assert max(unequal.own_bubbles) == pytest.approx((p - 1) * (1.0 + 1.0 - 2 * 0.75))
    assert unequal.bubble == pytest.approx((p - 1) * 1.0)
    assert in_flight(table) == (2 * p - 1,) * p


@pytest.mark.parametrize(("p", "m"), FILLED)
def test_zb_v(p: int, m: int) -> None:
    """Own span 0 at F = I = W; (p-1)F/2 to the common end; 2p half-stage chunks on every rank
    (2405.15362).
    """
    table = drawn("zb-v", p, m)
    timeline = timed(table, 1, 1, 1)
    assert timeline.own_bubbles == (0,) * p and timeline.bubble == (p - 1) / 2
    assert in_flight(table) == (2 * p,) * p


@pytest.mark.parametrize(("p", "m"), FILLED)
def test_dualpipe_v(p: int, m: int) -> None:
    """(p-1)F/2 to the common end at F = I = W; 2p+1 half-stage chunks on every rank (DeepSeek)."""
    table = drawn("dualpipe-v", p, m)
    assert timed(table, 1, 1, 1).bubble == (p - 1) / 2
    assert in_flight(table) == (2 * p + 1,) * p


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_stages_lie_in_a_v(name: str) -> None:
    assert drawn(name, 4, 8).placement == (0, 1, 2, 3, 3, 2, 1, 0)


def test_interleaved_stages_go_round() -> None:
    assert generate("interleaved", 3, 3, 2).placement == (0, 1, 2, 0, 1, 2)


def legal(name: str, ranks: int) -> list[int]:
    """Microbatches from few to four a rank; the others are refused, see
    test_generate_refuses_by_name.
    """
    if name == "interleaved":
        return [ranks, 2 * ranks, 4 * ranks]
    if name == "dualpipe-v":
        return [2 * ranks, 2 * ranks + 1, 4 * ranks]
    return sorted({1, ranks - 1, ranks, ranks + 1, 2 * ranks - 1, 4 * ranks})


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_table_runs_before_and_after_lowering(name: str, ranks: int) -> None:
    for microbatches in legal(name, ranks):
        table = drawn(name, ranks, microbatches)
        lowered = lower(table)
        assert validate(table) == [] and validate(lowered) == []
        assert [[a for a in row if a.is_compute] for row in lowered.rows] == [
            list(row) for row in table.rows
        ]
        durations = uniform(table.stages, 1.0, 1.3, 0.6)
        ideal, real = simulate(table, durations).makespan, simulate(lowered, durations).makespan
        assert ideal - 1e-9 < real < LOWERED.get(name, 1.0) * ideal + 1e-9
        simulate(lowered, durations, 0.2, transport="rendezvous")


@pytest.mark.parametrize("name", names())
def test_one_rank_has_no_bubble_and_no_transfers(name: str) -> None:
    for microbatches in (1, 2, 5):
        table = lower(drawn(name, 1, microbatches))
        assert timed(table, 1.0, 1.3, 0.6).bubble == pytest.approx(0)
        assert not table.lowered and validate(table) == []
