"""1F1B after a warm-up of its own: memory and calls as rehearsed, time as simulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.costmodel.test_against_rehearsal import small, traffic
from workbench.costmodel.inputs.config import named_table
from workbench.costmodel.inputs.rank_workload import workload
from workbench.costmodel.pipeline_bubble import simulated_makespan, simulated_schedule
from workbench.costmodel.rates.constants import plan_constants
from workbench.costmodel.step_time import StepTime, step_time
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.rehearsal.rehearse import rehearse
from workbench.schedules import executable, generate, simulate

STAGES = 4
EIGHT = {"layers": 8, "hidden": 96, "heads": 4, "kv_heads": 4, "ffn": 160, "vocab": 300}
EVEN = {
    "layers": 32,
    "hidden": 8192,
    "heads": 64,
    "ffn": 32768,
    "vocab": 256,
    "max_positions": 4096,
}


def warmed_up(schedule: str, most: Any, **changes: Any) -> Plan:
    """A plan of four stages, eight microbatches."""
    pipeline = {"size": STAGES, "schedule": schedule, "in_flight": most}
    changes = {"strategy.preset": None, "strategy.pipeline": pipeline, **changes}
    return small(EIGHT, "ddp", STAGES, "fp32").replace(**{"training.global_batch": 16, **changes})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "most", "recompute"),
    [
        ("eager-1f1b", None, "none"),
        ("eager-1f1b", None, "full"),
        ("eager-1f1b", [7, 7, 1, 1], "none"),
        ("1f1b", 2, "none"),
        ("1f1b", [4, 1, 1, 1], "full"),
    ],
    ids=str,
)
def test_memory_and_traffic_are_the_rehearsed(schedule: str, most: Any, recompute: str) -> None:
    plan = warmed_up(schedule, most, **{"strategy.recompute": recompute})
    estimated, rehearsed = estimate(plan), rehearse(plan)
    assert estimated.peak_bytes_by_rank == pytest.approx(rehearsed.peak_bytes_by_rank, rel=0.005)
    assert traffic(estimated) == traffic(rehearsed)


def test_pairs_of_ranks_exchange_in_groups_of_two() -> None:
    """On NCCL, as a rehearsal has it."""
    plan = warmed_up("eager-1f1b", None, **{"cluster.gpu": "h100-sxm-80gb"})
    estimated, rehearsed = estimate(plan), rehearse(plan)
    assert traffic(estimated) == traffic(rehearsed)
    assert set(estimated.collectives.group_size) == {2, STAGES}


def on_gpus(schedule: str, most: Any = None, microbatches: int = 16) -> Plan:
    """Four equal stages."""
    return Plan.of(
        "tiny",
        gpu="h100-sxm-80gb",
        gpus=4,
        strategy="dapple",
        set={
            "model": EVEN,
            "strategy.pipeline.schedule": schedule,
            "strategy.pipeline.in_flight": most,
            "strategy.pipeline.partition": "uniform",
            "training.global_batch": microbatches,
            "training.micro_batch": 1,
        },
    )


def timed(plan: Plan) -> StepTime:
    """Its step on links a hundred times slower than they are."""
    resolved = plan.resolve()
    constants = plan_constants(resolved)
    slow = replace(constants, link_share=constants.link_share / 100)
    return step_time(workload(resolved), slow)


def test_transfers_of_eager_1f1b_show_on_the_way_down_and_back() -> None:
    late, eager = timed(on_gpus("1f1b")), timed(on_gpus("eager-1f1b"))
    waited = late.durations.communication["pipeline_comm"]
    assert waited.max() > 0 and not eager.durations.communication["pipeline_comm"].any()
    assert eager.durations.hidden_transfers == pytest.approx(waited)
    passes, hiding = (x.durations.forward + x.durations.backward for x in (late, eager))
    assert passes - hiding == pytest.approx(waited)
    # Of the slowest stage's 16 microbatches one is on the way down and back.
    assert late.seconds - eager.seconds == pytest.approx(15 * (passes.max() - hiding.max()))
    assert eager.seconds < 0.95 * late.seconds


def test_what_is_hidden_is_what_the_simulator_hides() -> None:
    """Transfers take a seventh of a forward."""
    plan = on_gpus("eager-1f1b").resolve()
    time = timed(plan)
    d = time.durations
    table = executable(generate("eager-1f1b", STAGES, plan.num_microbatches), early=True)
    passes = {"F": d.forward.tolist(), "B": d.backward.tolist()}
    transfer = float(d.hidden_transfers.sum()) / (2 * (STAGES - 1))
    assert 0.1 < transfer / d.forward.max() < 0.2
    found = simulate(table, passes, transfer, transport="nccl", pair_groups=True).makespan
    slowest = float((d.forward + d.backward).max())
    assert plan.num_microbatches * slowest + time.bubble == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize("most", [1, 3, [4, 2, 2, 1]], ids=str)
def test_a_bound_on_what_is_in_flight_costs_what_the_simulator_says(most: Any) -> None:
    """Of 1,000 microbatches, of which an estimate simulates 192."""
    plan = on_gpus("1f1b", most, microbatches=1000).resolve()
    d = timed(plan).durations
    held = [most] * STAGES if isinstance(most, int) else most
    table = generate("1f1b", STAGES, 1000, in_flight=held)
    found = simulate(table, {"F": d.forward.tolist(), "B": d.backward.tolist()}).makespan
    bubble = found - 1000 * float((d.forward + d.backward).max())
    assert timed(plan).bubble == pytest.approx(bubble, rel=1e-6)
    assert timed(on_gpus("1f1b", 4, microbatches=1000)).bubble < bubble


def test_a_bound_that_the_schedule_keeps_anyway_costs_nothing() -> None:
    assert timed(on_gpus("1f1b", 4)).seconds == timed(on_gpus("1f1b")).seconds


def test_a_bound_on_many_microbatches_in_flight_waits_for_the_steady_pace() -> None:
    """Twelve stages of 22 microbatches in flight: the pace of the first 36 is another."""
    pipeline = {"size": 12, "schedule": "eager-1f1b", "in_flight": 22}
    changes = {"cluster.gpus": 12, "strategy.pipeline": pipeline, "model": EVEN | {"layers": 12}}
    plan = on_gpus("eager-1f1b", microbatches=400).replace(**changes).resolve()
    w, d = workload(plan), timed(plan).durations
    every = simulated_schedule(w, d, named_table(w.fixed, 400)).makespan
    assert simulated_makespan(w, d) == pytest.approx(every, rel=1e-6)
