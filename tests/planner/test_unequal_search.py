"""Stages searched each by itself, beside tensor size, recomputation and microbatches: what is found
is legal, is what `estimate` says, and meets the conditions.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.costmodel.inputs.rank_workload import workload
from workbench.costmodel.memory.peak_memory import peak_memory
from workbench.costmodel.microbatch_durations import stage_passes
from workbench.errors import PlanError
from workbench.plan.model.layer_profile import Layer, LayerProfile
from workbench.plan.model.layer_profile_csv import write_layer_profile
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.search import Candidate, SearchResult, search
from workbench.planner.search.search_space import neutral_plan
from workbench.planner.unequal_stages.estimated_layers import BlockSplit, estimated_layers
from workbench.planner.unequal_stages.memory import activation_bytes, stage_state_bytes
from workbench.planner.unequal_stages.stage_times import Stage
from workbench.units import GIB


def job(model: str = "llama-2-7b", gpu: str = "rtx-4090", gpus: int = 8, **set: Any) -> Plan:
    changes = {key.replace("__", "."): value for key, value in set.items()}
    plan = Plan.model_validate({"model": model, "cluster": {"gpu": gpu, "gpus": gpus}})
    return plan.replace(**{"training.global_batch": 32, **changes})


@cache
def found(*where: str) -> SearchResult:
    return search(job(), space="unequal", top=20, where=where)


def check_estimate(one: Candidate) -> None:
    said = estimate(one.plan)
    assert said.step_seconds == pytest.approx(one.seconds, rel=1e-9)
    assert max(said.peak_bytes_by_rank.values()) == pytest.approx(one.peak_bytes, rel=1e-9, abs=32)


def test_a_candidate_is_what_estimate_says_of_its_plan() -> None:
    result = found()
    assert len(result.top) > 10
    for one in (*result.top, *result.pareto):
        check_estimate(one)
        assert one.risk is not None and one.risk <= 0.05
    assert [one.score for one in result.top] == sorted(one.score for one in result.top)


def test_every_candidate_uses_all_gpus_and_the_whole_batch() -> None:
    for one in found().top:
        full, stages = one.plan.resolve(), one.stages
        assert stages is not None
        assert full.num_microbatches == stages.microbatches
        replicas = full.strategy.pipeline.replicas
        ranks = sum(replicas) if replicas else full.sizes["data"] * full.sizes["pipeline"]
        assert full.world_size == 8 == full.sizes["tensor"] * ranks


def test_it_finds_what_the_default_space_finds_or_better() -> None:
    """The default space has 1f1b of balanced stages too; what it shards further is left out."""
    where = ["strategy.data.zero<=1", "strategy.data.offload=none"]
    where += ["strategy.pipeline.schedule=1f1b", "strategy.recompute in none,selective,full"]
    usual = search(job(), top=1, where=where)
    assert found().top[0].expected_seconds <= usual.top[0].expected_seconds * (1 + 1e-9)


def test_conditions_hold() -> None:
    """On stages, on what a plan says besides, and on what is estimated."""
    result = found(
        "strategy.pipeline.size=2",
        "strategy.pipeline.schedule=1f1b",
        "strategy.tensor.size<=2",
        "training.micro_batch<=8",
        "peak_gib<20",
    )
    assert result.top
    for one in result.top:
        pipeline = one.plan.strategy.pipeline
        assert (pipeline.size, pipeline.schedule) == (2, "1f1b")
        assert one.plan.strategy.tensor.ranks <= 2
        assert one.plan.training.micro_batch <= 8
        assert one.peak_bytes < 20 * GIB


def test_one_stage_is_data_parallelism() -> None:
    result = search(job("gpt2-xl", gpu="h100-sxm-80gb", gpus=4), space="unequal", top=5)
    one = next(one for one in result.top if one.plan.strategy.pipeline.size == 1)
    assert one.plan.strategy.pipeline.replicas is None
    assert one.plan.resolve().sizes["data"] == 4 // one.plan.strategy.tensor.ranks
    check_estimate(one)


def test_two_stages_of_three_gpus_have_one_and_two_replicas() -> None:
    """48 blocks: a third on one GPU, and on two the rest with the head, as heavy as two blocks."""
    plan = job("gpt2-xl", gpus=3, training__global_batch=24, training__sequence_length=1024)
    result = search(plan, space="unequal", where=["strategy.pipeline.size=2"])
    for one in result.top:
        pipeline = one.plan.strategy.pipeline
        if one.plan.strategy.tensor.ranks == 1:
            assert pipeline.replicas in ([1, 2], [2, 1])
        check_estimate(one)
    first = result.top[0].plan.strategy.pipeline
    assert (first.replicas, first.partition) == ([1, 2], [18, 30])


def test_a_search_that_finds_nothing_says_why() -> None:
    one = search(job("llama-3-70b", gpus=2), space="unequal")
    assert not one.top and "no stages on 2 rtx-4090 of" in one.empty
    two, four = job("gpt2-xl", gpus=2), job("gpt2-xl", gpus=4)
    other = search(two, space="unequal", where=["peak_gib<2"])
    assert "no plan meets 'peak_gib<2'; without it" in other.empty
    empty = search(two, space="unequal", where=["strategy.context.size=2"])
    assert "no plan meets 'strategy.context.size=2' (searched: 1); without it" in empty.empty
    deep = search(four, space="unequal", where=["strategy.pipeline.size>99"])
    assert "(searched: 1, 2, 3, 4); without it" in deep.empty


def test_too_few_layers_and_sequences_are_no_lack_of_memory(tmp_path: Path) -> None:
    plan = job(
        str(profile_file(tmp_path, *[0.1] * 6)), "v100-sxm2-16gb", 7, training__global_batch=1
    )
    empty = search(plan).empty
    assert "each of 7 replicas has a layer and a sequence, and 6 x 1" in empty
    assert empty.endswith("legal: cluster.gpus up to 6, or training.global_batch from 2")
    assert search(plan.replace(**{"training.global_batch": 2})).top
    assert search(plan.replace(**{"cluster.gpus": 6})).top


def test_fewer_gpus_are_tried_for_other_objectives() -> None:
    result = search(job("gpt2-xl", gpu="h100-sxm-80gb", gpus=8), "gpus", space="unequal", top=1)
    assert result.top[0].plan.world_size == 1
    check_estimate(result.top[0])


def test_other_planners_stand_beside() -> None:
    result = found()
    written = result.to_json()
    names = [one["name"] for one in written["baselines"]]
    assert names[:3] == ["the first plan", "PipeDream's planner", "GPipe's straight split"]
    assert len(names) == 5
    assert result.baselines[0].seconds == pytest.approx(
        result.top[0].stages and result.top[0].stages.latency_seconds, rel=0.05
    )
    for text in (repr(result), result._repr_html_()):
        assert "latency model" in text and "GPipe" in text and "3.23 x" in text
    assert written["top"][0]["stages"]["activation_communication_ratio"] > 0


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_block_is_what_a_stage_of_the_cost_model_takes_and_keeps(recompute: str) -> None:
    """Eight stages of 4 blocks and 4 replicas of 2 GPUs each. What one stage needs beside states
    and activations is taken to be what all need: half a GiB too much where little else is kept.
    """
    plan = job("llama-3-8b", "h100-sxm-80gb", 64, training__global_batch=128)
    split = BlockSplit(2, True, recompute)
    layers = estimated_layers(neutral_plan(plan, 64), split, 1)
    strategy = {
        "tensor": {"size": 2, "sequence": True},
        "pipeline": {"size": 8, "partition": [4] * 8},
        "recompute": recompute,
        "data": {"zero": 1},
    }
    full, constants = with_calibration(
        plan.replace(strategy=strategy, **{"training.micro_batch": 1}).resolve()
    )
    w, batch = workload(full), layers.of(32, 4)
    stages = [Stage(4 * i, 4 * i + 4, (4,)) for i in range(8)]
    profile = layers.profile
    for seconds, sums in zip(stage_passes(w, constants), (profile.forward, profile.backward)):
        ours = [sums[one.end] - sums[one.first] for one in stages]
        assert ours == pytest.approx(list(seconds), rel=0.1)
    held = [
        float(stage_state_bytes(profile, one, batch) + n * activation_bytes(profile, one, batch))
        for one, n in zip(stages, w.microbatches_in_flight)
    ]
    live = peak_memory(w, constants).live
    over = np.array(held) + layers.temporary - live
    assert over.min() > -0.01 * live.max()
    assert over.max() < 0.5 * GIB


def profile_file(folder: Path, *seconds: float) -> Path:
    """Layers of `seconds` forward and twice as many backward for one sequence, in a chain."""
    layers = tuple(
        Layer(f"n{i}", f"layer {i}", s, 2 * s, 1e3, 1e3, (f"n{i - 1}",) if i else ())
        for i, s in enumerate(seconds)
    )
    path = folder / "layers.csv"
    write_layer_profile(LayerProfile("drawn", 1, layers), path)
    return path


def test_a_profile_whose_first_half_costs_twice_takes_two_gpus_for_it(tmp_path: Path) -> None:
    path = profile_file(tmp_path, *[0.2] * 3, *[0.1] * 3)
    plan = job(str(path), gpus=3, training__global_batch=48)
    where = ["strategy.pipeline.size=2"]
    result = search(plan, where=where)  # the unequal space is a layer profile's own
    first = result.top[0].plan.strategy.pipeline
    assert (first.replicas, first.partition) == ([2, 1], [3, 3])
    for one in result.top:
        check_estimate(one)
        assert (one.risk, one.mfu, one.interval) == (None, None, None)
    written = result.to_json()["top"][0]
    assert written["step_seconds_90"] is None
    assert written["simulated_seconds"] == written["seconds"]


@pytest.mark.parametrize("space", ["default", "wide", "vast"])
def test_a_layer_profile_has_no_other_space(tmp_path: Path, space: str) -> None:
    with pytest.raises(PlanError, match=rf"--space: is '{space}'.*legal: unequal"):
        search(job(str(profile_file(tmp_path, 0.1, 0.1)), gpus=2), space=space)


def test_a_long_profile_is_cut_at_some_of_its_layers(tmp_path: Path) -> None:
    plan = job(str(profile_file(tmp_path, *[0.1, 0.2] * 300)), gpus=4)
    result = search(plan, top=3, where=["strategy.pipeline.size>1"])
    assert any("of the 600 layers alone" in note for note in result.notes)
    for one in result.top:
        partition = one.plan.strategy.pipeline.partition
        assert isinstance(partition, list) and sum(partition) == 600
        check_estimate(one)


def test_a_placement_that_no_plan_can_say_is_a_note(tmp_path: Path) -> None:
    """Activations that take long between nodes: two stages that each have a GPU of both nodes send
    within nodes alone.
    """
    layers = [
        Layer(f"n{i}", f"layer {i}", 0.01, 0.02, 1e8, 1e3, (f"n{i - 1}",) if i else ())
        for i in range(2)
    ]
    path = tmp_path / "layers.csv"
    write_layer_profile(LayerProfile("drawn", 1, tuple(layers)), path)
    plan = job(str(path), gpus=4, cluster__gpus_per_node=2)
    result = search(plan, where=["strategy.pipeline.size=2"])
    assert result.top[0].plan.strategy.pipeline.size == 2
    assert "faster than the best" in result.notes[1]
    assert result.notes[1].endswith("each node of stage after stage 1:1, 1:1")


def test_no_pipeline_of_a_given_size_beats_the_front() -> None:
    front = found().pareto
    for size in (1, 2, 4, 8):
        for one in found(f"strategy.pipeline.size={size}").pareto:
            assert not [
                other
                for other in front
                if one.expected_seconds < other.expected_seconds * 0.995
                and one.peak_bytes < other.peak_bytes * 0.995
            ]


def test_a_framework_without_stages_of_their_own_gets_equal_ones() -> None:
    plan = job("gpt2-xl", "t4", 6, strategy__stack="megatron", training__global_batch=48)
    result = search(plan, space="unequal", where=["strategy.pipeline.size>1"])
    assert len(result.top) > 2
    for one in result.top:
        pipeline = one.plan.strategy.pipeline
        assert (pipeline.replicas, pipeline.in_flight) == (None, None)
    own = {"size": 2, "replicas": [4, 2]}
    with pytest.raises(PlanError, match=r"replicas: is \[4, 2\], but megatron .*legal: null"):
        plan.replace(strategy={"stack": "megatron", "pipeline": own}).resolve()
