"""The closed form of a step of unequal stages, by hand and against the simulator."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest

from tests.planner.unequal_stages import drawn
from workbench.planner.unequal_stages.latency import latency
from workbench.planner.unequal_stages.memory import stages_in_flight, with_transfers
from workbench.planner.unequal_stages.simulated import simulated, simulated_gpipe
from workbench.planner.unequal_stages.stage_times import StageTimes, stage_times

PLANS = 200
ROUNDING = 1e-9


@cache
def errors(warm_up: str) -> tuple[list[float], list[float]]:
    """How far the closed form is under the simulator, in percent: all paths, single pivots alone;
    on 200 drawn plans with at least four microbatches a stage.
    """
    draw = random.Random(20)
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(PLANS):
        layers = draw.randint(6, 32)
        profile, topology = drawn.profile(draw, layers, 4), drawn.topology(draw, 16)
        stages = drawn.stages(draw, layers, topology, 8)
        batch = drawn.batch(draw, len(stages), topology.world_size)
        times = stage_times(profile, stages, topology, batch)
        held = with_transfers(stages_in_flight(profile, stages, topology, batch, warm_up))
        known = latency(times, held, batch.microbatches)
        truth = simulated(times, held, batch.microbatches).makespan
        for errors_, seconds in zip(found, (known.seconds, known.pivots_only)):
            errors_.append(100 * (1 - seconds / truth))
    return found


@pytest.mark.parametrize(("warm_up", "median", "high"), [("PB", 1, 4), ("PA", 5, 12)])
def test_closed_form_is_a_near_lower_bound(warm_up: str, median: float, high: float) -> None:
    all_paths, _ = errors(warm_up)
    assert min(all_paths) >= -100 * ROUNDING
    assert np.median(all_paths) <= median
    assert np.percentile(all_paths, 95) <= high


def test_pivots_alone_are_a_bound_too() -> None:
    for warm_up in ("PA", "PB"):
        all_paths, pivots = errors(warm_up)
        assert all(one >= other - 100 * ROUNDING for one, other in zip(pivots, all_paths))


def test_no_times_and_warm_ups_break_the_bound() -> None:
    """Also fewer microbatches than stages, stages that take no time, any in flight that may run."""
    draw = random.Random(1)
    for _ in range(400):
        stages, microbatches = draw.randint(1, 9), draw.randint(1, 20)
        figures = [
            tuple(draw.choice([0.0, draw.random(), 10 * draw.random()]) for _ in range(stages))
            for _ in range(3)
        ]
        held = sorted((draw.randint(1, 25) for _ in range(stages)), reverse=True)
        times = StageTimes(*figures)
        truth = simulated(times, held, microbatches).makespan
        assert latency(times, held, microbatches).seconds <= truth * (1 + ROUNDING)


def test_equal_stages_as_in_the_paper_on_1f1b() -> None:
    """(M + S - 1) (F + B) without transfers: PipeDream-flush, 2104.04473, section 2.2."""
    times = StageTimes((1.0, 0.0) * 3 + (1.0,), (2.0, 0.0) * 3 + (2.0,), (0.0,) * 7)
    assert latency(times, with_transfers((4, 3, 2, 1)), 8).seconds == pytest.approx(11 * 3)


def test_an_all_reduce_of_a_later_stage_hides_behind_the_ending_phase() -> None:
    """Two stages, F = 1, B = 2, M = 4: 1F1B ends at 15, stage 1's last backward at 13."""
    both = ((1.0, 0.0, 1.0), (2.0, 0.0, 2.0))
    for reduced, seconds in (((0.0, 0.0, 2.0), 15), ((0.0, 0.0, 3.0), 16), ((1.0, 0.0, 3.0), 16)):
        times = StageTimes(*both, reduced)
        assert latency(times, (3, 2, 1), 4).seconds == pytest.approx(seconds)
        assert simulated(times, (3, 2, 1), 4).makespan == pytest.approx(seconds)


def test_few_in_flight_beside_slow_transfers() -> None:
    """Last stage 3, transfer 1 each way, one microbatch on the link at a time: 5 s a microbatch
    under PA, 3 s under PB (and 6 s of way down and up).
    """
    times = StageTimes((1.0, 1.0, 1.0), (1.0, 1.0, 2.0), (0.0,) * 3)
    for held, seconds in (((2, 1, 1), 1 + 10 * 5 + 1), ((3, 2, 1), 2 + 10 * 3 + 2)):
        known = latency(times, held, 10)
        assert known.seconds == pytest.approx(seconds)
        assert simulated(times, held, 10).makespan == pytest.approx(seconds)
        assert known.pivots_only == pytest.approx(34)


def test_gpipe_of_equal_stages_takes_as_long_as_1f1b() -> None:
    times = StageTimes((1.0, 0.0, 1.0), (2.0, 0.0, 2.0), (0.0,) * 3)
    assert simulated_gpipe(times, 6).makespan == pytest.approx((6 + 1) * 3)
