"""Plans whose model is a layer profile: what is legal, what an estimate says."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import PlanError
from workbench.plan.model.layer_profile import Layer, LayerProfile
from workbench.plan.model.layer_profile_csv import write_layer_profile
from workbench.plan.schema import Plan, build_plan
from workbench.planner import estimate
from workbench.planner.profiled_models.planned_stages import planned_stages
from workbench.planner.profiled_models.step_seconds import step_seconds, timeline
from workbench.profile import Profile

MB = 1e6
GPU = {
    "name": "round",
    "memory_gib": 1.0,
    "bandwidth_gbs": 100.0,
    "tflops": {"fp32": 1.0},
    "link_gbs": 10.0,
    "pcie_gbs": 10.0,
}


def layers(*figures: tuple[float, float, float, float], **known: Any) -> LayerProfile:
    """Layers of (forward, backward, activation bytes, parameter bytes) for 2 sequences, one after
    the other.
    """
    chain = [
        Layer(f"n{i}", f"l{i}", *row, inputs=(f"n{i - 1}",) if i else ())
        for i, row in enumerate(figures)
    ]
    return LayerProfile("chain", 2, tuple(chain), **known)


HEAVY_FIRST = layers(*[(0.02, 0.04, MB, 4 * MB)] * 2, *[(0.01, 0.02, MB, 4 * MB)] * 2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_layer_profile(HEAVY_FIRST, tmp_path / "layers.csv")
    return tmp_path / "layers.csv"


def written(path: Path, gpus: int, pipeline: dict[str, Any], **training: int) -> Plan:
    return build_plan(
        {
            "model": str(path),
            "cluster": {"gpu": GPU, "gpus": gpus},
            "strategy": {"pipeline": pipeline},
            "training": {"global_batch": 24, "micro_batch": 4, **training},
        }
    )


def bytes_at_peak(found: Profile, rank: int) -> dict[str, int]:
    rows = found.rows("memory", "rank", "category", "bytes", moment="peak")
    return {category: size for at, category, size in rows if at == rank}


def test_one_device_takes_what_its_layers_take(file: Path) -> None:
    """24 sequences are 12 profiled passes of 0.18 s."""
    found = estimate(written(file, 1, {}))
    assert found.source == "estimated" and found.fits
    assert found.step_seconds == pytest.approx(12 * 0.18)
    assert found.notes["speed_up"] == pytest.approx(1)
    assert found.collectives.empty
    parts = {"compute": 2.16, "pipeline_comm": 0, "bubble": 0, "data_comm": 0}
    assert found.notes["time"] == pytest.approx(parts)


def test_memory_by_category(file: Path) -> None:
    """AdamW in fp32: 16 MB of parameters and gradients each, 32 MB of moments; the outputs of four
    layers for two passes.
    """
    kept = bytes_at_peak(estimate(written(file, 1, {})), 0)
    assert kept == {"parameters": 16e6, "gradients": 16e6, "optimizer": 32e6, "activations": 8e6}


def test_a_stage_with_twice_the_work_has_two_replicas(file: Path) -> None:
    found = estimate(written(file, 3, {"size": 2, "replicas": [2, 1]}))
    plan = written(file, 3, {"size": 2, "replicas": [2, 1]}).resolve()
    assert plan.strategy.pipeline.partition == [2, 2]
    stages = planned_stages(plan)
    assert stages.times.forward[::2] == pytest.approx((0.04, 0.04))  # of a microbatch of 4
    assert found.notes["microbatches_in_flight"] == [2, 1] == list(stages.in_flight)
    ideal = 6 * 0.12 + 0.04 + 0.08
    assert ideal < found.step_seconds < 1.01 * ideal
    assert found.notes["closed_form_seconds"] <= found.step_seconds * (1 + 1e-9)
    assert sum(found.notes["time"].values()) == pytest.approx(found.step_seconds)


def test_transfers_and_all_reduces_are_those_of_the_stages(file: Path) -> None:
    """A microbatch of 4 sequences sends 2 MB: 1 MB of each of two replicas."""
    frame = estimate(written(file, 3, {"size": 2, "replicas": [2, 1]})).collectives
    names = ["rank", "axis", "kind", "group_size", "bytes", "count"]
    assert sorted(map(tuple, frame[names].to_numpy().tolist())) == [
        (0, "data", "all_reduce", 2, 8e6, 1),
        (0, "pipeline", "recv", 3, 1e6, 6),
        (0, "pipeline", "send", 3, 1e6, 6),
        *[(2, "pipeline", "recv", 3, 1e6, 6)] * 2,  # a peer each
        *[(2, "pipeline", "send", 3, 1e6, 6)] * 2,
    ]


def test_a_replica_with_fewer_sequences_keeps_less_and_ends_earlier(file: Path) -> None:
    """Three sequences over two replicas: two and one, of the 2 that a profiled pass has."""
    found = estimate(written(file, 3, {"size": 2, "replicas": [2, 1]}, micro_batch=3))
    kept = [bytes_at_peak(found, rank)["activations"] for rank in range(3)]
    assert kept == [2 * 2e6, 2e6, 3e6 * 3 / 2]  # in flight 2, 2 and 1; the last its input too
    first = found.timeline[(found.timeline.action == "F") & (found.timeline.microbatch == 0)]
    assert (first.end - first.start).tolist() == pytest.approx([0.04, 0.02, 0.03])
    assert found.fits and len(found.peak_bytes_by_rank) == 3


def test_equal_replicas_are_a_data_axis(file: Path) -> None:
    shared = estimate(written(file, 4, {"size": 2, "replicas": [2, 2]}))
    plain = estimate(written(file, 4, {"size": 2}, micro_batch=2))
    assert shared.step_seconds == pytest.approx(plain.step_seconds)
    assert shared.peak_bytes_by_rank == plain.peak_bytes_by_rank


def test_stages_lie_where_their_ranks_do(file: Path) -> None:
    cluster = {"gpu": GPU, "gpus": 8, "gpus_per_node": 4}
    plan = written(file, 8, {"size": 2}, micro_batch=1).replace(cluster=cluster)
    outermost = planned_stages(plan.resolve()).stages
    assert [stage.counts for stage in outermost] == [(4, 0), (0, 4)]
    order = ["tensor", "context", "pipeline", "data"]
    innermost = planned_stages(plan.replace(**{"strategy.placement": order}).resolve()).stages
    assert [stage.counts for stage in innermost] == [(2, 2), (2, 2)]


def test_gpipe_keeps_every_microbatch(file: Path) -> None:
    early, late = (
        estimate(written(file, 2, {"size": 2, "partition": [2, 2], "schedule": name}))
        for name in ("1f1b", "gpipe")
    )
    kept = [bytes_at_peak(one, 0)["activations"] for one in (early, late)]
    assert kept == [2 * 4e6, 6 * 4e6]  # two layers, two passes, in flight 2 and 6
    assert late.notes["microbatches_in_flight"] == [6, 6]
    assert early.step_seconds == pytest.approx(6 * 0.24 + 0.04, rel=1e-3)
    assert late.step_seconds == pytest.approx(6 * 0.08 + 0.04 + 0.08 + 6 * 0.16, rel=1e-3)


def test_what_layers_keep_counts_where_the_profile_says_it(tmp_path: Path) -> None:
    profile = LayerProfile(
        "kept", 2, (Layer("a", "a", 0.1, 0.2, MB, MB, (), kept_bytes=7 * MB),), 8, "fp32", "here"
    )
    write_layer_profile(profile, tmp_path / "layers.csv")
    found = estimate(written(tmp_path / "layers.csv", 1, {}, sequence_length=8))
    assert bytes_at_peak(found, 0)["activations"] == 2 * 7e6
    assert found.notes["layer_times"].startswith("as measured here; not scaled to")


def test_the_only_stage_reduces_while_it_runs_backward(file: Path) -> None:
    overlapped = estimate(written(file, 2, {}))
    plan = written(file, 2, {}).replace(**{"strategy.data.overlap": False})
    last = 4 / 16  # of the gradients, of the layer that runs backward last
    exposed = estimate(plan).notes["time"]["data_comm"]
    assert overlapped.notes["time"]["data_comm"] == pytest.approx(last * exposed)


def test_a_long_step_goes_on_at_its_pace(file: Path) -> None:
    short, long = (
        estimate(written(file, 2, {"size": 2}, global_batch=size)) for size in (40_000, 80_000)
    )
    assert long.step_seconds == pytest.approx(2 * short.step_seconds, rel=1e-3)
    assert long.notes["timeline_microbatches"] < 20_000


@pytest.mark.parametrize(("stages", "seed"), [(30, 2), pytest.param(60, 1, marks=pytest.mark.slow)])
def test_a_long_step_of_many_stages_takes_what_all_of_it_takes_simulated(
    stages: int, seed: int, tmp_path: Path
) -> None:
    """At the pace of the second half of what is simulated it would be 2 to 3 % short."""
    draw, count = random.Random(seed), 20 * stages
    each = [(draw.uniform(0.01, 0.03), 2 * draw.uniform(0.01, 0.03)) for _ in range(stages)]
    write_layer_profile(layers(*[(*one, 100 * MB, MB) for one in each]), tmp_path / "layers.csv")
    pipeline = {"size": stages, "schedule": "eager-1f1b", "partition": [1] * stages}
    batch = {"micro_batch": 2, "global_batch": 2 * count}
    planned = planned_stages(written(tmp_path / "layers.csv", stages, pipeline, **batch).resolve())
    every = timeline(planned, planned.times, count).makespan
    assert step_seconds(planned, False).simulated == pytest.approx(every, rel=1e-9)


def test_what_the_file_does_not_say_is_not_modelled(file: Path) -> None:
    plan, said = written(file, 2, {"size": 2}), ("copies of a weight", "backward alone", "outputs")
    missing = estimate(plan).notes["not_modelled"]
    assert all(each in missing for each in said)
    known = [replace(x, tied=(), backward_bytes=MB, kept_bytes=MB) for x in HEAVY_FIRST.layers]
    write_layer_profile(replace(HEAVY_FIRST, layers=tuple(known)), file)
    found = estimate(plan)
    assert not any(each in found.notes["not_modelled"] for each in said)
    assert [bytes_at_peak(found, rank)["temporary"] for rank in (0, 1)] == [2 * MB, 2 * MB]


def test_a_stage_that_holds_nothing_fits(tmp_path: Path) -> None:
    """The last layers of a published profile, labels and loss, have neither parameters nor size."""
    write_layer_profile(layers((0.1, 0.2, 0, MB), (0.1, 0.2, 0, 0)), tmp_path / "layers.csv")
    found = estimate(written(tmp_path / "layers.csv", 2, {"size": 2}))
    assert found.fits and found.peak_bytes_by_rank == {0: 4e6, 1: 0}


def test_advice_is_a_smaller_micro_batch(tmp_path: Path) -> None:
    write_layer_profile(layers((0.1, 0.2, 400 * MB, MB)), tmp_path / "layers.csv")
    found = estimate(written(tmp_path / "layers.csv", 1, {}, micro_batch=8))
    assert found.fits is False
    assert found.notes["advice"]["changes"] == {"training.micro_batch": 4}


def test_a_resolved_plan_names_the_file_by_its_hash(file: Path) -> None:
    full = written(file, 1, {}).pin()
    assert full.profiled and full.profiled.sha256 and full.profiled.name == "chain"
    again = build_plan(full.model_dump())
    assert again.resolve() == full
    file.write_text(file.read_text().replace("20,40", "21,40"))
    with pytest.raises(PlanError, match=r"model.sha256: the plan was resolved with"):
        again.resolve()


def test_one_of_several_models_is_named(file: Path) -> None:
    rows = file.read_text().splitlines()
    other = [row.replace("chain", "other") for row in rows[1:3]]
    file.write_text("\n".join([*rows, *other]) + "\n")
    with pytest.raises(PlanError, match="holds several models; name one of chain, other"):
        written(file, 1, {}).resolve()
    named = build_plan({"model": f"{file}#other", "cluster": {"gpu": GPU, "gpus": 1}}).resolve()
    assert named.num_layers == 2 and named.model_name == "other"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strategy.tensor.size": 2}, "strategy.tensor.size: is 2"),
        ({"strategy.context.size": 2}, "strategy.context.size: is 2"),
        ({"strategy.data.zero": 1}, "strategy.data.zero: is 1"),
        ({"strategy.recompute": "full"}, "strategy.recompute: is full"),
        ({"strategy.kernels": "fused"}, "strategy.kernels: is fused"),
        ({"strategy.pipeline.chunks": 2}, "strategy.pipeline.chunks: is 2"),
        (
            {"strategy.pipeline.schedule": "zb-h1"},
            "pipeline.schedule: is zb-h1, which is not modelled .*: gpipe, 1f1b or eager-1f1b",
        ),
        (
            {"strategy.pipeline.partition": [0, 4]},
            "strategy.pipeline.partition: gives stage 0 of 2 no layer; legal: a layer or more",
        ),
        (
            {"strategy.pipeline.partition": [3, 2]},
            "strategy.pipeline.partition: .* legal: 2 numbers that add up to 4",
        ),
        (
            {"strategy.pipeline.size": 6, "cluster.gpus": 6},
            "strategy.pipeline.size: 6 x chunks 1 = 6 stages, but chain has 4 layers; .* 1 to 4",
        ),
        ({"training.dropout": 0.1}, "training.dropout: is 0.1"),
        ({"training.micro_batch": 5}, "training.global_batch: is 24"),
        ({"strategy.data.reduce": "microbatch"}, "data.reduce: is microbatch, .*legal: step"),
        ({"strategy.data.bucket_mib": 50.0}, r"data.bucket_mib: is 50.0, .*legal: 25.0"),
        ({"strategy.preset": "megatron-3d"}, "strategy.tensor.size: is 'third', which follows"),
        ({"training.sequence_length": 9}, r"training.sequence_length: is 9, .* legal: 8"),
        ({"strategy.precision": "fp16"}, r"strategy.precision: is fp16, .* legal: fp32"),
    ],
)
def test_what_was_not_measured_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    known = layers(*[(0.1, 0.2, MB, MB)] * 4, sequence_length=8, precision="fp32")
    write_layer_profile(known, tmp_path / "layers.csv")
    plan = written(tmp_path / "layers.csv", 2, {"size": 2})
    with pytest.raises(PlanError, match=said):
        plan.replace(**changes).resolve()


def test_chunks_are_refused_once(file: Path) -> None:
    changes = {"strategy.pipeline.chunks": 2, "strategy.pipeline.replicas": [1, 1]}
    with pytest.raises(PlanError) as refused:
        written(file, 2, {"size": 2}).replace(**changes).resolve()
    assert [p.field for p in refused.value.problems] == ["strategy.pipeline.chunks"]


def test_stages_are_balanced_by_measured_times(tmp_path: Path) -> None:
    """Eight units of work: three replicas take three times as many as one."""
    profile = layers(*[(0.1, 0.2, MB, MB)] * 8)
    write_layer_profile(profile, tmp_path / "layers.csv")
    plan = written(tmp_path / "layers.csv", 4, {"size": 2, "replicas": [3, 1]}, micro_batch=3)
    assert plan.resolve().strategy.pipeline.partition == [6, 2]
    even = written(tmp_path / "layers.csv", 3, {"size": 3, "partition": "uniform"})
    with pytest.raises(PlanError, match="uniform, but 3 stages do not divide 8 layers"):
        even.resolve()
