"""Runs that stall, and what the network and the host add to a step of a stack that waits for its
hosts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from workbench.costmodel.communication.collective_cost import axis_links, collective_seconds
from workbench.costmodel.frameworks.stragglers import (
    ranks_waited_for,
    run_stalls,
    stall_seconds,
    straggler_probability,
)
from workbench.costmodel.inputs.rank_workload import Workload, workload
from workbench.costmodel.rates.constants import Constants
from workbench.costmodel.step_time import step_time, step_time_bounds, step_time_breakdown
from workbench.plan.schema import Plan
from workbench.planner.calibrated_plan import with_calibration


def setting(
    gpus: int, tensor: int, pipeline: int, zero: int = 0, micro_batch: int = 1, **changed: Any
) -> tuple[Workload, Constants]:
    strategy = {
        "tensor": {"size": tensor, "sequence": tensor > 1},
        "pipeline": {"size": pipeline},
        "data": {"zero": zero},
        "stack": "nanotron",
    }
    description: dict[str, Any] = {
        "model": "llama-3-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "gpus": gpus, "fabric": "aws-p5"},
        "training": {"global_batch": 256, "micro_batch": micro_batch, "sequence_length": 4096},
        "strategy": strategy,
    }
    full, constants = with_calibration(Plan.model_validate(description).resolve())
    return workload(full), replace(constants, **changed)


def test_many_nodes_stall_and_few_do_not() -> None:
    assert [bool(run_stalls(*setting(gpus, 4, 2))) for gpus in (8, 64, 256, 512)] == [
        False,
        False,
        False,
        True,
    ]
    assert straggler_probability(setting(8, 4, 2)[0].fixed, setting(8, 4, 2)[1]) == 0.0
    few, many = (
        straggler_probability(w.fixed, c) for w, c in (setting(16, 4, 2), setting(256, 4, 2))
    )
    assert few == pytest.approx(1 - (1 - 0.013) ** 2) and many == pytest.approx(
        1 - (1 - 0.013) ** 32
    )


def test_a_full_card_stalls_wherever_it_stands() -> None:
    assert not run_stalls(*setting(8, 2, 2, 1, 1)) and run_stalls(*setting(8, 2, 2, 1, 4))


def test_every_message_of_a_run_that_stalls_waits() -> None:
    two, eight = setting(512, 4, 2), setting(512, 4, 8)
    for (w, c), a_microbatch in ((two, 2), (eight, 4)):
        more = a_microbatch * float(w.microbatches) + w.pipeline - 1
        assert float(stall_seconds(w, c)) == pytest.approx(0.27 * more)
        stalled, calm = step_time(w, c), step_time(w, replace(c, stall_ms=0.0))
        assert float(stalled.seconds) - float(calm.seconds) == pytest.approx(0.27 * more)
        assert sum(step_time_breakdown(w, stalled).values()) == pytest.approx(
            float(stalled.seconds)
        )
    assert float(stall_seconds(*setting(512, 8, 1))) == 0.0


def test_the_interval_reaches_to_a_stall_that_is_not_rare() -> None:
    w, c = setting(64, 4, 2)
    time = step_time(w, c)
    low, high = step_time_bounds(w, c, time, (0.8, 1.4))
    assert (low, high) == pytest.approx(
        (0.8 * float(time.seconds), 1.4 * (float(time.seconds) + float(stall_seconds(w, c))))
    )
    w, c = setting(8, 4, 2)
    time = step_time(w, c)
    assert step_time_bounds(w, c, time, (0.8, 1.4))[1] == pytest.approx(1.4 * float(time.seconds))


def test_hosts_are_waited_for_under_a_pipeline_over_nodes_and_where_a_run_stalls() -> None:
    found = {
        key: float(np.max(ranks_waited_for(*setting(*key))))
        for key in ((64, 4, 2), (64, 4, 1), (512, 4, 1), (512, 16, 1))
    }
    assert found == {(64, 4, 2): 4, (64, 4, 1): 0, (512, 4, 1): 4, (512, 16, 1): 8}
    assert float(np.max(ranks_waited_for(*setting(16, 2, 1, 1, 8)))) == 2


def test_under_zero_1_gradients_are_reduced_whole_and_hide_behind_nothing() -> None:
    w, c = setting(64, 4, 1, 1)
    chosen = [call for call in step_time(w, c).calls if call.axis == "data"]
    assert [(call.kind, call.action) for call in chosen] == [
        ("all_reduce", "REDUCE_GRAD"),
        ("all_gather", "OPTIMIZER"),
    ]
    wire = axis_links(w, c)["data"]
    took = sum(
        call.count * collective_seconds(call.kind, call.bytes, call.group_size, wire, c)
        for call in chosen
    )
    assert step_time(w, c).after["data_comm"] == pytest.approx(float(np.max(took)))


def test_rings_over_nodes_pay_the_network_for_every_rank_and_only_all_reduce_has_a_tree() -> None:
    w, c = setting(64, 32, 1)
    wire = axis_links(w, c)["tensor"]
    assert float(wire.latency) == pytest.approx(w.fixed.fabric.nic_latency_us * 1e-6)
    nothing = [
        float(collective_seconds(kind, 0.0, 32, wire, c))
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    ]
    assert nothing == pytest.approx(
        [31 * float(wire.latency)] * 2 + [2 * c.latency_ranks * float(wire.latency)]
    )


def test_a_late_host_hides_what_moves_but_not_the_latency_of_a_network() -> None:
    inside, over = setting(64, 8, 1), setting(64, 16, 1)
    exposed = [
        float(np.max(step_time(*one).durations.communication["tensor_comm"]))
        for one in (inside, over)
    ]
    w, c = over
    calls = [call for call in step_time(w, c).calls if call.axis == "tensor"]
    starts = sum(
        np.max(
            call.count
            * collective_seconds(call.kind, 0.0, call.group_size, axis_links(w, c)["tensor"], c)
        )
        for call in calls
    )
    assert exposed[0] == 0.0
    assert exposed[1] == pytest.approx(float(starts / w.microbatches))
