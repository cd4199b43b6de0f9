"""Doubts about points measured on a busy machine, on given times."""

from __future__ import annotations

import pytest

from workbench.engine.calibrate import believable_figures
from workbench.engine.calibrate.measure import judge
from workbench.engine.calibrate.rank_visits import PointSample

KIB = 2**10


def message(kind: str, size: int) -> believable_figures.Key:
    return "collectives", (("kind", kind), ("group", 2), ("dtype", "fp32"), ("bytes", size))


def found(
    times: dict[believable_figures.Key, list[float]], memory: float = 10e9
) -> dict[str, tuple[str, bool]]:
    samples = [
        [
            PointSample(section, dict(labels), "together", seconds)
            for (section, labels), seconds in times.items()
        ]
    ]
    _, doubts = judge(samples * 2, 2, memory)
    return {doubt.point.rpartition(" ")[2]: (doubt.why, doubt.refused) for doubt in doubts}


def test_steady_figures_are_believed() -> None:
    times = {
        message("all_gather", size): [1e-4 + size / 1e9 * x for x in (1.0, 1.02, 1.05, 1.1)]
        for size in (4 * KIB, 64 * KIB, 4096 * KIB)
    }
    assert found(times) == {}


def test_collectives_faster_than_memory_are_refused() -> None:
    """An all-gather of 309,201 GB/s, and one that is a difference of noise."""
    size = 16 * 2**20
    times = {
        message("all_gather", size): [size / 309_201e9] * 4,
        message("all_to_all", size): [size / 50e9] * 4,
    }
    against = found(times)
    assert against[str(size)][1] is True
    (one,) = found({message("all_to_all", size): [size / 50e9] * 4}).values()
    assert one == ("50 GB/s, memory carries 10", True)
    (none,) = found({message("all_gather", 256): [1e-6] * 4}).values()
    assert none == ("took no measurable time", True)


@pytest.mark.parametrize(("spread", "doubted"), [(1.1, False), (1.3, True), (3.0, True)])
def test_scattered_repeats_are_marked_unsteady(spread: float, doubted: bool) -> None:
    times = {message("send", 64 * KIB): [1e-4, 1e-4, 1e-4 * spread, 1e-4 * spread] * 2}
    against = found(times)
    assert bool(against) is doubted
    if doubted:
        ((why, refused),) = against.values()
        assert why.startswith("unsteady: ") and why.endswith("%") and not refused


def test_a_larger_message_that_is_quicker_makes_both_unsteady() -> None:
    times = {
        message("send", 64 * KIB): [5e-3] * 4,
        message("send", 1024 * KIB): [1e-3] * 4,
        message("all_reduce", 2048 * KIB): [8e-4] * 4,
    }
    assert found(times) == {str(n * KIB): ("unsteady: 400%", False) for n in (64, 1024)}


def test_refused_figures_are_left_out_and_steady_ones_stay() -> None:
    good, bad = message("send", 64 * KIB), message("send", 256)
    figures = {good: 1e-4, bad: 1e-6, ("operator", (("autograd", False),)): 1e-9}
    doubts = believable_figures.find_doubts(figures, {}, 2, 10e9)
    assert set(believable_figures.believable(figures, doubts, 2)) == {
        good,
        ("operator", (("autograd", False),)),
    }
    assert believable_figures.believable(figures, doubts, 4) == figures  # of another world


def test_too_few_repeats_say_nothing() -> None:
    assert (
        believable_figures.relative_iqr([1.0, 9.0]) == 0.0
        and believable_figures.relative_iqr([]) == 0.0
    )


def test_the_memory_that_counts_is_the_quickest_stream() -> None:
    assert (
        believable_figures.memory_rate(
            {("memory", (("bytes", 100),)): 10.0, ("memory", (("bytes", 300),)): 10.0}
        )
        == 30.0
    )
    assert believable_figures.memory_rate({}) == float("inf")


def test_the_load_stands_beside_the_figures() -> None:
    busy = believable_figures.conditions()
    assert busy.load_average >= 0 and busy.cpus >= 1 and busy.free_memory_gib > 0
