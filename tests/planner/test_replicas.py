"""Stages replicated unequally, as DAPPLE plans them (2007.01045): legality, what each rank does,
what it gains.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from workbench.cli.tables import stages_table
from workbench.costmodel.communication.collective_volume import step_collectives
from workbench.costmodel.inputs.config import named_table
from workbench.costmodel.inputs.rank_workload import workload
from workbench.costmodel.microbatch_durations import microbatch_durations
from workbench.costmodel.pipeline_bubble import simulated_makespan, simulated_schedule
from workbench.errors import PlanError
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import Plan
from workbench.plan.stage_replicas import batch_share
from workbench.planner import estimate
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.explain.bottlenecks import memory_sentence
from workbench.profile import Profile
from workbench.runs.launch.free_memory import least_bytes
from workbench.schedules import generate, write_csv
from workbench.units import bytes_text, gib_text


def dapple(replicas: list[int] | None, stages: int = 2, gpus: int = 16, **changes: Any) -> Plan:
    asked: dict[str, Any] = {
        "strategy.pipeline.size": stages,
        "training.global_batch": 240,
        "training.sequence_length": 1024,
    }
    if replicas is not None:
        asked["strategy.pipeline.replicas"] = replicas
    set = asked | {key.replace("__", "."): value for key, value in changes.items()}
    return Plan.of("gpt3-6.7b", gpu="h100-sxm-80gb", gpus=gpus, strategy="dapple", set=set)


IN_TURN = {"strategy__pipeline__distribution": "round_robin"}


def peaks(profile: Profile) -> dict[int, int]:
    return profile.peak_bytes_by_rank


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("zero", [0, 1])
def test_equal_replicas_are_the_plain_plan(schedule: str, zero: int) -> None:
    changes = {"strategy__pipeline__schedule": schedule, "strategy__data__zero": zero}
    plain, shared = (
        estimate(dapple(r, 4, 16, **changes, training__micro_batch=size))
        for r, size in ((None, 2), ([4, 4, 4, 4], 8))
    )
    assert shared.step_seconds == pytest.approx(plain.step_seconds, rel=1e-12)
    assert shared.notes["time"] == pytest.approx(plain.notes["time"], rel=1e-12)
    assert peaks(shared) == peaks(plain)
    ours, theirs = (
        sorted(
            (rank, axis, kind, size, count)
            for rank, axis, kind, size, count in zip(
                *(p.collectives[c] for c in ("rank", "axis", "kind", "bytes", "count"))
            )
            if axis != "pipeline"
        )
        for p in (shared, plain)
    )
    assert ours == theirs
    sent = [
        {
            (rank, kind): (p.collectives["bytes"] * p.collectives["count"])[at].sum()
            for rank, kind in product(range(0, 16, 4), ("send", "recv"))
            for at in [(p.collectives["rank"] == rank) & (p.collectives.kind == kind)]
        }
        for p in (shared, plain)
    ]
    assert sent[0] == sent[1]


def test_each_stage_splits_the_same_microbatch_over_its_own_replicas() -> None:
    plan = dapple([15, 1]).resolve()
    w = workload(plan)
    assert plan.sizes["data"] == 1 and plan.num_microbatches == 16 == w.microbatches
    assert (w.tokens * w.data).tolist() == [15 * 1024] * 2 and w.tokens.tolist() == [
        1024,
        15 * 1024,
    ]
    profile = estimate(plan)
    reduced = profile.collectives[(profile.collectives.axis == "data")]
    assert set(reduced.group_size) == {15} and set(reduced["rank"]) == {0, 1}
    # The first replica alone sends the gradient of the tied weight.
    assert profile.representative == {0: 0, **dict.fromkeys(range(1, 15), 1), 15: 15}


def test_work_is_conserved() -> None:
    shared, plain = estimate(dapple([12, 4])), estimate(dapple(None))
    flops = [p.notes["model_flops_utilisation"] * p.step_seconds for p in (shared, plain)]
    assert flops[0] == pytest.approx(flops[1], rel=1e-12)


def test_a_heavy_stage_with_more_replicas_beats_equal_replication() -> None:
    """Two stages of 24 and 8 layers on 16 cards; the paper's VGG-19 goes as far as 15 and 1."""
    layers = {"strategy__pipeline__partition": [24, 8], "training__global_batch": 192}
    unequal, equal = (estimate(dapple(r, **layers)) for r in ([12, 4], [8, 8]))
    assert unequal.step_seconds < 0.8 * equal.step_seconds


def test_balanced_stages_give_a_stage_of_more_replicas_more_layers() -> None:
    head = 1  # as many multiplications as a layer
    first, last = dapple([12, 4]).resolve().strategy.pipeline.partition
    assert (first, last + head) == (25, 8)


def test_an_odd_number_of_cards_can_be_shared_out() -> None:
    profile = estimate(dapple([2, 1], 2, 3, training__global_batch=12))
    assert profile.world_size == 3 and len(peaks(profile)) == 3


def shared_unevenly() -> Plan:
    """Of four sequences, three replicas have 2, 1 and 1."""
    changes = {"training__micro_batch": 4, "strategy__pipeline__partition": [16, 8, 8]}
    return dapple([3, 1, 2], 3, 6, **changes)


def test_each_kind_of_replica_has_rows() -> None:
    """Rank 2 differs from rank 1 in that it sends no gradient of the tied weight."""
    profile = estimate(shared_unevenly())
    assert profile.representative == {rank: rank for rank in range(6)}
    assert peaks(profile)[2] == peaks(profile)[1] < peaks(profile)[0]


def test_a_replica_of_fewer_sequences_starts_with_its_stage_and_ends_earlier() -> None:
    frame = estimate(shared_unevenly()).timeline
    first, second = (frame[frame["rank"] == rank].reset_index() for rank in (0, 1))
    for name in ("stage", "microbatch", "action", "start"):
        assert first[name].tolist() == second[name].tolist()
    assert ((second.end - second.start) < 0.7 * (first.end - first.start)).all()
    assert (second.end > second.start).all()


def test_words_about_a_stage_are_of_its_busiest_replica() -> None:
    """Not of all its replicas together."""
    plan = shared_unevenly()
    profile = estimate(plan)
    most = max(peaks(profile).values())
    sentence = memory_sentence(with_calibration(plan.resolve())[0], profile)
    assert gib_text(most) in sentence
    built = stages_table(profile)
    assert built is not None and built.row_count == 3
    assert bytes_text(most) in map(str, built.columns[1].cells)


@pytest.mark.parametrize(
    ("replicas", "changes", "field"),
    [
        ([8, 4], {}, "strategy.pipeline.replicas"),
        ([8, 4, 4], {}, "strategy.pipeline.replicas"),
        ([12, 4], {"strategy__data__zero": 2}, "strategy.data.zero"),
        ([12, 4], {"training__micro_batch": 10}, "training.micro_batch"),
        (
            [12, 4],
            {"strategy__pipeline__schedule": "zb-v", "strategy__pipeline__chunks": 2},
            "strategy.pipeline.chunks",
        ),
        (
            [12, 4],
            {"strategy__placement": ["tensor", "pipeline", "context", "data"]},
            "strategy.placement",
        ),
        ([15, 1], {"training__global_batch": 32}, "training.global_batch"),
        (
            [12, 4],
            {**IN_TURN, "training__micro_batch": 1, "training__global_batch": 11},
            "training.global_batch",
        ),
        (None, IN_TURN, "strategy.pipeline.distribution"),
        ([12, 4], {"strategy__data__shard": 2}, "strategy.data.shard"),
        ([12, 4], {"strategy__pipeline__chunks": 2}, "strategy.pipeline.chunks"),
        ([12, 4], {"strategy__tensor__size": 3}, "cluster.gpus"),
        ([], {}, "strategy.pipeline.replicas"),
        ([12, 4], {"strategy__tensor__size": 2}, "strategy.pipeline.replicas"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    replicas: list[int] | None, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(PlanError) as error:
        dapple(replicas, **changes).resolve()
    assert [problem.field for problem in error.value.problems] == [field]


@pytest.mark.parametrize(
    "tensor, said",
    [
        (8, r"legal: 2 numbers that add up to 2 = 16 GPUs"),
        (16, r"legal: at most 1 stage of a rank each, 16 GPUs / \(tensor 16 x context 1\)"),
    ],
)
def test_legal_replicas_are_possible_ones(tensor: int, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        dapple([12, 4], strategy__tensor__size=tensor).resolve()


def test_a_drawn_schedule_has_no_turns(tmp_path: Path) -> None:
    write_csv(generate("1f1b", 2, 16), tmp_path / "own.csv")
    drawn = {"strategy__pipeline__schedule": str(tmp_path / "own.csv"), **IN_TURN}
    with pytest.raises(PlanError, match=r"distribution: .* legal: split, or schedule gpipe, 1f1b"):
        dapple([15, 1], **drawn).resolve()


@pytest.mark.parametrize("microbatches", [3, 4, 7])
def test_replicas_in_turn_have_each_microbatch_once(microbatches: int) -> None:
    batch = {"training__micro_batch": 2, "training__global_batch": 2 * microbatches}
    plan = dapple([3, 1], gpus=4, **IN_TURN, **batch).resolve()
    shares = [batch_share(plan, replica, 3).samples() for replica in range(3)]
    for m in range(microbatches):
        assert shares[m % 3][m // 3] == [2 * m, 2 * m + 1]
    assert sum(map(len, shares)) == microbatches


def test_a_long_step_goes_on_at_the_pace_of_what_was_simulated() -> None:
    """Also where in_flight leaves replicas idle, and under GPipe."""
    batch = {"training__micro_batch": 1, "training__global_batch": 450}
    for changes in (
        {},
        {"strategy__pipeline__in_flight": 1},
        {"strategy__pipeline__schedule": "gpipe"},
        {"strategy__pipeline__schedule": "zb-h1"},
    ):
        plan, constants = with_calibration(
            dapple([9, 5, 2], 3, **IN_TURN, **batch, **changes).resolve()
        )
        w = workload(plan)
        d = microbatch_durations(w, constants, step_collectives(w))
        every = simulated_schedule(w, d, named_table(w.fixed, 450)).makespan
        assert simulated_makespan(w, d) == pytest.approx(every, rel=2e-3)


def test_work_in_turn_is_conserved() -> None:
    """A step has the FLOPs of one whose replicas share microbatches; each replica is drawn."""
    turns, split = (
        estimate(dapple([12, 4], **changes))
        for changes in (IN_TURN | {"training__micro_batch": 1}, {"training__micro_batch": 12})
    )
    flops = [p.notes["model_flops_utilisation"] * p.step_seconds for p in (turns, split)]
    assert flops[0] == pytest.approx(flops[1], rel=1e-12)
    sizes = turns.timeline.groupby("rank").size().to_dict()
    assert list(sizes) == list(range(16)) and sizes[0] == sizes[11] == 2 * 240 / 12


def test_fp8_scales_a_microbatch_that_a_replica_has_alone() -> None:
    plan = dapple([12, 4], strategy__precision="fp8", training__micro_batch=16, **IN_TURN)
    assert unsupported(plan.resolve(), "run") == []


def test_fp8_scales_no_shared_microbatch() -> None:
    plan = dapple([12, 4], strategy__precision="fp8").resolve()
    assert [p.field for p in unsupported(plan, "run")] == ["strategy.pipeline.replicas"]


@pytest.mark.parametrize("verb", ["run", "rehearse"])
def test_it_runs(verb: Any) -> None:
    assert unsupported(dapple([12, 4]).resolve(), verb) == []


def test_the_least_memory_divides_what_the_replicas_of_a_stage_shard() -> None:
    whole, sharded = (
        least_bytes(dapple([12, 4], strategy__data__zero=zero).resolve()) for zero in (0, 1)
    )
    assert sharded < whole
    assert dapple([12, 4]).resolve().most_replicas == 12
