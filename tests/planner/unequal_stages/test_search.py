"""Placements, stage times and the search of unequal stages, by hand and against brute force."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from tests.planner.unequal_stages import brute_force, drawn
from workbench.errors import PlanError
from workbench.plan.model.layer_profile import Layer, LayerProfile
from workbench.planner.unequal_stages import Batch, Stage, Topology, evaluate, search_stages
from workbench.planner.unequal_stages.memory import (
    backward_bytes,
    most_in_flight,
    stages_in_flight,
    with_transfers,
)
from workbench.planner.unequal_stages.parameter_bytes import stage_parameter_bytes
from workbench.planner.unequal_stages.placements import POLICIES, place
from workbench.planner.unequal_stages.stage_times import stage_times

TWO_NODES = Topology(2, 4, 100.0, 10.0, 20.0, most_rings=2)


def chain(*figures: tuple[float, float, float, float], batch: int = 1) -> LayerProfile:
    """Layers of (forward, backward, activation bytes, parameter bytes), one after the other."""
    layers = [
        Layer(f"n{i}", f"l{i}", *row, inputs=(f"n{i - 1}",) if i else ())
        for i, row in enumerate(figures)
    ]
    return LayerProfile("chain", batch, tuple(layers))


def test_three_policies_on_a_node_in_use() -> None:
    """2007.01045, section 4: fresh nodes first, used nodes first, spread over used nodes."""
    used = before = (3, 1, 0)
    assert place(used, before, "fresh", 5, 4) == (1, 0, 4)
    assert place(used, before, "append", 3, 4) == (1, 2, 0)
    assert place(used, before, "scatter", 2, 4) == (1, 1, 0)
    assert place(used, before, "scatter", 5, 4) == (1, 3, 1)
    assert place((0, 0, 0), (0, 0, 0), "scatter", 3, 4) == (1, 1, 1)


def test_placements_are_those_of_one_device_after_another() -> None:
    draw = random.Random(0)
    for _ in range(100):
        nodes, devices = draw.randint(1, 4), draw.randint(1, 6)
        used = tuple(draw.choice([0, devices, draw.randint(0, devices)]) for _ in range(nodes))
        before = tuple(draw.randint(0, count) for count in used)
        for policy in POLICIES:
            for replicas in range(1, nodes * devices - sum(used) + 1):
                alone = brute_force.one_by_one(used, before, policy, replicas, devices)
                assert place(used, before, policy, replicas, devices) == alone


def test_all_reduce_and_transfer_by_hand() -> None:
    assert TWO_NODES.all_reduce_per_byte((1, 0)) == 0
    assert TWO_NODES.all_reduce_per_byte((4, 0)) == pytest.approx(2 * 3 / 4 / (100 * 2))
    assert TWO_NODES.all_reduce_per_byte((4, 4)) == pytest.approx(2 * 7 / 8 / 20)
    assert TWO_NODES.transfer_per_byte((4, 0), (0, 4)) == pytest.approx(1 / 10)
    assert TWO_NODES.transfer_per_byte((2, 0), (1, 0)) == pytest.approx(1 / 100)
    # Three quarters of the microbatch are on node 0 and a half should be.
    assert TWO_NODES.transfer_per_byte((3, 1), (1, 1)) == pytest.approx(1 / 4 / 10)


def test_the_busiest_replica_sets_the_pace() -> None:
    """4 sequences over 3 replicas: 2, 1, 1."""
    profile = chain((1.0, 2.0, 60.0, 8.0), (1.0, 2.0, 60.0, 8.0), batch=2)
    stages = (Stage(0, 1, (3, 0)), Stage(1, 2, (0, 1)))
    times = stage_times(profile, stages, TWO_NODES, Batch(5, 4))
    assert times.forward == pytest.approx((1.0, 120 / 10, 2.0))
    assert times.backward == pytest.approx((2.0, 120 / 10, 4.0))
    assert times.all_reduce == pytest.approx((8 * 2 * 2 / 3 / 100, 0, 0))
    assert times.activation_communication_ratio == pytest.approx(24 / 4.5)
    even = stage_times(profile, stages, TWO_NODES, Batch(5, 4, whole_sequences=False))
    assert even.forward[0] == pytest.approx(2 / 3)


def test_warm_up_policies_and_memory() -> None:
    """PA: S - i, PB: 2 (S - i) - 1 (2007.01045), and never more than the stage before."""
    profile = chain(*[(1.0, 1.0, 10.0, 5.0)] * 3)
    stages = [Stage(i, i + 1, (1,)) for i in range(3)]
    batch, large = Batch(12, 1, optimizer_factor=4.0), Topology(1, 3, 1.0, 1.0, 1.0)
    assert stages_in_flight(profile, stages, large, batch, "PA") == (3, 2, 1)
    assert stages_in_flight(profile, stages, large, batch, "PB") == (5, 3, 1)
    assert with_transfers((5, 3, 1)) == (5, 4, 3, 2, 1)
    assert with_transfers((3, 2, 1)) == (3, 2, 2, 1, 1)
    small = replace(large, memory=20.0 + 20.0 * 2)  # a later stage keeps its input too
    assert [most_in_flight(profile, stage, small, batch) for stage in stages] == [4, 2, 2]
    assert stages_in_flight(profile, stages, small, batch, "PB") == (4, 2, 1)
    assert stages_in_flight(profile, stages, replace(large, memory=35.0), batch, "PA") is None


TIED = (("n0", 40.0),)
"""Of the last of three layers, with the first."""


def tied_chain() -> LayerProfile:
    plain = chain(*[(1.0, 2.0, 60.0, 80.0)] * 2, (1.0, 2.0, 60.0, 8.0))
    *layers, last = plain.layers
    return replace(plain, layers=(*layers, replace(last, tied=TIED)))


def test_a_stage_holds_a_copy_of_what_it_shares_with_one_before() -> None:
    profile = tied_chain()
    held = {
        (first, end): float(stage_parameter_bytes(profile, first, end))
        for first in range(3)
        for end in range(first + 1, 4)
    }
    assert held == {(0, 1): 80, (0, 2): 160, (0, 3): 168, (1, 2): 80, (1, 3): 128, (2, 3): 48}
    stages, batch = [Stage(0, 2, (1, 0)), Stage(2, 3, (1, 0))], Batch(4, 1, optimizer_factor=2.0)
    memory = replace(TWO_NODES, memory=2 * 48 + 60 + 60 - 1.0)  # a microbatch and its input
    assert [int(most_in_flight(profile, s, memory, batch)) for s in stages] == [0, 0]
    assert int(most_in_flight(profile, stages[1], replace(memory, memory=216.0), batch)) == 1


def test_backward_needs_most_where_what_is_kept_and_what_it_needs_are_most() -> None:
    """Layers keep 60 each. The first needs 100 more in its backward, when the others' are freed,
    or where it shares 40 with the last, whose gradient waits for it to be summed, 180.
    """
    plain = chain(*[(1.0, 2.0, 60.0, 80.0)] * 3)
    needs = (100.0, 0.0, 5.0)
    layers = [replace(x, backward_bytes=size) for x, size in zip(plain.layers, needs)]
    profile, batch = replace(plain, layers=tuple(layers)), Batch(4, 2)

    def beside(first: int, end: int) -> float:
        return float(backward_bytes(profile, Stage(first, end, (1,)), batch))

    bounds = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert [beside(*each) for each in bounds] == [200, 80, 10, 0, 10]  # two sequences
    memory = Topology(1, 1, 1.0, 1.0, 1.0, memory=160 + 80 + 240.0)
    assert int(most_in_flight(profile, Stage(0, 2, (1,)), memory, batch)) == 1
    less = replace(memory, memory=479.0)
    assert int(most_in_flight(profile, Stage(0, 2, (1,)), less, batch)) == 0
    layers[2] = replace(layers[2], tied=TIED)
    profile = replace(plain, layers=tuple(layers))
    assert [beside(*each) for each in bounds] == [200, 80, 2 * (60 + 180 - 180), 0, 10]


def test_stages_exchange_gradients_of_what_they_share() -> None:
    """Each replica gets all of them: two of a node over their own links, or over the network, on
    which one replica sends three copies.
    """
    profile, batch = tied_chain(), Batch(6, 6, gradient_factor=2.0)
    near = (Stage(0, 2, (1, 0)), Stage(2, 3, (2, 0)))
    own = 2 * 48 * (2 * 1 / 2) / 100
    reduced = stage_times(profile, near, TWO_NODES, batch).all_reduce
    assert reduced == pytest.approx((2 * 40 * 2 / 100, 0, own))
    far = (Stage(0, 2, (1, 0)), Stage(2, 3, (0, 3)))
    assert stage_times(profile, far, TWO_NODES, batch).all_reduce[0] == pytest.approx(
        2 * 40 * 3 / 10
    )
    whole = stage_times(profile, [Stage(0, 3, (1, 0))], TWO_NODES, batch)
    assert whole.all_reduce == (0,)


def test_a_model_whose_first_half_costs_twice_takes_two_devices_for_it() -> None:
    """6 sequences: 18 s and 36 s a microbatch in both stages of 2 : 1; straight cuts of 2 layers
    each have 24 s and 48 s in the first.
    """
    profile = chain(*[(2.0, 4.0, 1.0, 1.0)] * 3, *[(1.0, 2.0, 1.0, 1.0)] * 3)
    topology, batch = Topology(1, 3, 1e6, 1e6, 1e6), Batch(24, 6)
    in_two = evaluate(profile, [Stage(0, 3, (2,)), Stage(3, 6, (1,))], topology, batch)
    thirds = evaluate(profile, [Stage(i, i + 2, (1,)) for i in (0, 2, 4)], topology, batch)
    assert in_two.seconds == pytest.approx((24 + 1) * 54, rel=1e-4)
    assert thirds.seconds >= 24 * 72
    assert in_two.seconds < thirds.seconds
    assert search_stages(profile, topology, batch)[0].seconds <= in_two.seconds


def test_what_does_not_fit_is_refused() -> None:
    profile = chain((1.0, 2.0, 10.0, 5.0), (1.0, 2.0, 10.0, 5.0))
    topology = Topology(1, 2, 1.0, 1.0, 1.0, memory=4.0)
    with pytest.raises(PlanError, match=r"strategy.pipeline.replicas: no stages on 2 devices"):
        search_stages(profile, topology, Batch(4, 2))
    wide = Topology(1, 4, 1.0, 1.0, 1.0)
    assert evaluate(profile, [Stage(0, 2, (4,))], wide, Batch(4, 3)) is None
    with pytest.raises(PlanError, match=r"microbatches of 1 sequence$"):
        search_stages(profile, wide, Batch(4, 1))


def check_gaps(seeds: range) -> None:
    gaps = [brute_force.gap(seed) for seed in seeds]
    print(f"equal on {sum(gap <= 1e-9 for gap in gaps)} of {len(gaps)}, worst gap {max(gaps):.2%}")
    assert min(gaps) >= -1e-9
    assert sum(gap <= 1e-9 for gap in gaps) >= 0.95 * len(gaps)
    assert max(gaps) <= 0.05


def test_search_finds_what_brute_force_finds() -> None:
    check_gaps(range(12))


@pytest.mark.slow
def test_search_finds_what_brute_force_finds_on_300_instances() -> None:
    check_gaps(range(300))


def test_96_layers_on_64_devices_within_two_seconds() -> None:
    """Seconds of this process, whatever else the machine does."""
    draw = random.Random(0)
    profile, topology = drawn.profile(draw, 96), Topology(8, 8, 1e11, 1e9, 2e9, most_rings=4)
    start = time.process_time()
    plans = search_stages(profile, topology, Batch(64, 64))
    assert time.process_time() - start <= 2
    assert len(plans) == 10
    assert all(sum(plan.replicas) == 64 for plan in plans)
    assert [plan.simulated for plan in plans] == sorted(plan.simulated for plan in plans)
