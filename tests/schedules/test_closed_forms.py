"""The closed forms equal the simulator."""

from __future__ import annotations

import random

import numpy as np
import pytest

from workbench.schedules import Table, closed_forms, generate, in_flight, names, simulate, uniform

CHUNKS = {"interleaved": (2, 3, 4), "zb-v": (2,), "dualpipe-v": (2,)}
RATIOS = [
    (1.0, 1.0, 1.0),
    (1.0, 1.1, 0.9),
    (1.0, 2.0, 1.0),
    (1.0, 1.0, 0.0),
    (2.0, 1.0, 1.0),
    (1.0, 0.5, 3.0),
]


def tables(name: str, ranks: int, most: int) -> list[tuple[Table, int]]:
    """Every legal table of up to `most` microbatches, with its chunks."""
    made = []
    for chunks in CHUNKS.get(name, (1,)):
        for m in range(1, most + 1):
            if (name != "interleaved" or m % ranks == 0) and (
                name != "dualpipe-v" or ranks == 1 or m >= 2 * ranks
            ):
                made.append((generate(name, ranks, m, chunks), chunks))
    return made


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 9])
def test_bubble_is_that_of_the_simulator(name: str, ranks: int) -> None:
    """All legal microbatches, fixed and random F : I : W up to 64 : 1."""
    draw = random.Random(ranks)
    for table, chunks in tables(name, ranks, 2 * ranks + 3):
        for f, i, w in [
            *RATIOS[:2],
            draw.choice(RATIOS),
            *([2 ** draw.uniform(-3, 3) for _ in "FIW"] for _ in "123"),
        ]:
            timeline = simulate(table, uniform(table.stages, f / chunks, i / chunks, w / chunks))
            found = closed_forms.bubble(name, ranks, table.microbatches, chunks, f, i, w)
            assert found == pytest.approx(timeline.bubble, abs=1e-12 * timeline.makespan), (
                table.microbatches,
                f,
                i,
                w,
            )


@pytest.mark.parametrize("ranks", [4, 5, 6])
def test_zb_v_that_just_fills_is_that_of_the_simulator(ranks: int) -> None:
    """Between ranks and twice as many microbatches each of its paths is somewhere the longest: many
    draws.
    """
    draw = random.Random(ranks)
    for table in (generate("zb-v", ranks, m, 2) for m in range(ranks + 1, 2 * ranks)):
        for _ in range(40):
            f, i, w = (2 ** draw.uniform(-3, 3) for _ in "FIW")
            timeline = simulate(table, uniform(table.stages, f / 2, i / 2, w / 2))
            found = closed_forms.bubble("zb-v", ranks, table.microbatches, 2, f, i, w)
            assert found == pytest.approx(timeline.bubble, abs=1e-12 * timeline.makespan), (
                table.microbatches,
                f,
                i,
                w,
            )


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 9])
def test_in_flight_is_that_of_the_table(name: str, ranks: int) -> None:
    for table, chunks in tables(name, ranks, 2 * ranks + 3):
        found = [
            closed_forms.in_flight(name, rank, ranks, table.microbatches, chunks)
            for rank in range(ranks)
        ]
        assert found == list(in_flight(table)), table.microbatches


@pytest.mark.parametrize("name", names())
def test_arrays_give_what_numbers_give(name: str) -> None:
    chunks = CHUNKS.get(name, (1,))[0]
    ranks, microbatches = np.array([1, 2, 4, 8])[:, None], np.array([16, 32])
    seconds = (np.array([1.0, 0.7]), np.array([1.2, 0.4]), np.array([0.5, 1.1]))
    bubbles = closed_forms.bubble(name, ranks, microbatches, chunks, *seconds)
    held = closed_forms.in_flight(name, ranks - 1, ranks, microbatches, chunks)
    assert bubbles.shape == (4, 2) and np.broadcast_to(held, (4, 2)).shape == (4, 2)
    for (row, column), found in np.ndenumerate(bubbles):
        p, m, one = (
            int(ranks[row, 0]),
            int(microbatches[column]),
            [float(s[column]) for s in seconds],
        )
        assert found == closed_forms.bubble(name, p, m, chunks, *one)
        assert np.broadcast_to(held, (4, 2))[row, column] == closed_forms.in_flight(
            name, p - 1, p, m, chunks
        )


def test_a_schedule_without_a_closed_form_is_refused() -> None:
    words = "has no closed form; there are: 1f1b, dualpipe-v, eager-1f1b"
    with pytest.raises(ValueError, match=words):
        closed_forms.bubble("mine.csv", 4, 8, 1, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match=words):
        closed_forms.in_flight("mine.csv", 0, 4, 8, 1)
