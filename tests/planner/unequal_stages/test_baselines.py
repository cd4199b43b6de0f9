"""PipeDream's planner, GPipe's split and data parallelism on small layer profiles."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.planner.unequal_stages import drawn
from tests.planner.unequal_stages.test_search import chain
from workbench.plan.model.layer_profile import LayerProfile
from workbench.planner.unequal_stages import (
    Batch,
    Stage,
    Topology,
    data_parallel_seconds,
    gpipe_stages,
    pipedream_stages,
)

Plan = list[tuple[int, int, int]]


def plans(first: int, layers: int, devices: int) -> Iterator[Plan]:
    """Every cut of layers from `first` on and every replication on all `devices`."""
    yield [(first, layers, devices)]
    for cut in range(first + 1, layers):
        for replicas in range(1, devices):
            for rest in plans(cut, layers, devices - replicas):
                yield [(first, cut, replicas), *rest]


def slowest(profile: LayerProfile, plan: Plan, rate: float) -> float:
    """PipeDream's objective (SOSP'19, section 3.1): the slowest stage or transfer."""
    seconds = [2 * profile.crossing[first] / rate for first, _, _ in plan[1:]]
    for first, end, replicas in plan:
        compute = profile.forward[end] - profile.forward[first]
        compute += profile.backward[end] - profile.backward[first]
        size = profile.parameters[end] - profile.parameters[first]
        seconds.append(max(compute, 2 * (replicas - 1) * size / rate) / replicas)
    return max(seconds)


def test_pipedreams_planner_finds_the_least_slowest_stage() -> None:
    draw = random.Random(7)
    for _ in range(30):
        layers, devices = draw.randint(2, 6), draw.randint(2, 4)
        profile, rate = drawn.profile(draw, layers), 10 ** draw.uniform(9, 11)
        found = pipedream_stages(profile, Topology(1, devices, rate, rate, rate))
        written = [(stage.first, stage.end, stage.replicas) for stage in found]
        best = min(slowest(profile, plan, rate) for plan in plans(0, layers, devices))
        assert slowest(profile, written, rate) == pytest.approx(best)


def test_pipedreams_stage_over_nodes_has_its_replicas_in_each() -> None:
    """Small parameters and large activations: both nodes hold the whole model, over 4 devices."""
    profile = chain(*[(1.0, 2.0, 1e9, 1.0)] * 4)
    topology = Topology(2, 2, 1e12, 1e3, 1e3)
    found = pipedream_stages(profile, topology)
    assert all(stage.counts[0] == stage.counts[1] for stage in found)
    assert sum(stage.replicas for stage in found) == 4


def test_gpipe_takes_a_stage_a_device() -> None:
    profile = chain(*[(1.0, 2.0, 1.0, 1.0)] * 5)
    stages = gpipe_stages(profile, Topology(2, 2, 1.0, 1.0, 1.0))
    assert [stage.end - stage.first for stage in stages] == [1, 1, 1, 2]
    assert stages[2] == Stage(2, 3, (0, 1))


def test_data_parallelism_with_and_without_overlap() -> None:
    """4 sequences a device at once: 4 s and 8 s; 10 bytes a layer in rings at 5 bytes/s: 3 s each,
    the second layer's while the first runs backward.
    """
    profile = chain((0.5, 1.0, 1.0, 10.0), (0.5, 1.0, 1.0, 10.0))
    topology, batch = Topology(2, 2, 5.0, 5.0, 5.0), Batch(2, 8)
    assert data_parallel_seconds(profile, topology, batch, False) == pytest.approx(12 + 6)
    assert data_parallel_seconds(profile, topology, batch, True) == pytest.approx(12 + 3)
    small = Topology(2, 2, 5.0, 5.0, 5.0, memory=24.0)  # two sequences beside 20 bytes
    assert data_parallel_seconds(profile, small, batch, True) == pytest.approx(12 - 2 + 6)
    none = Topology(2, 2, 5.0, 5.0, 5.0, memory=21.0)
    assert data_parallel_seconds(profile, none, batch, True) is None
