"""ZeRO: the estimate against the real engine on fake tensors, peaks, states by category and every
collective.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.costmodel.test_against_rehearsal import ODD, small, traffic
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.profile import Profile
from workbench.rehearsal.rehearse import rehearse

TWO_STAGES = {"strategy.pipeline.size": 2}
OFFLOADED_INPUTS = {"strategy.recompute": "full", "strategy.offload_activations": True}
SHARE = {"strategy.data.offload": "optimizer", "strategy.data.offload_ratio": 0.8}
ONE_MICROBATCH = {"training.global_batch": 4}
TILES = {"strategy.data.tile_factor": 4}
RECOMPUTED_SHARD = {"strategy.recompute": "full", "strategy.data.shard": 2}
CASES: list[tuple[Any, str, str, int, dict[str, Any]]] = [
    ("tiny", "bf16", "zero-1", 2, {}),
    ("tiny", "fp32", "zero-2", 2, {}),
    ("tiny-gpt", "bf16", "zero-2", 4, {"strategy.data.shard": 2}),
    ("tiny", "fp32", "zero-3", 2, {}),
    ("tiny", "bf16", "fsdp", 2, {}),
    (ODD, "fp32", "zero-3", 2, {}),
    ("tiny", "fp32", "zero-3", 4, {"strategy.data.shard": 2, "strategy.data.reduce": "step"}),
    ("tiny", "fp32", "zero-3", 2, {"strategy.data.keep_gathered": True}),
    ("tiny", "fp32", "zero-3", 2, {"strategy.data.in_flight": 1}),
    (ODD, "bf16", "fsdp", 2, {"strategy.data.in_flight": 4}),
    ("tiny-gpt", "bf16", "zero-2", 4, {"strategy.data.shard": 2, "strategy.data.in_flight": 1}),
    ("tiny-gpt", "bf16", "zero-2", 4, {"strategy.data.shard": 2, "strategy.data.in_flight": 3}),
    (ODD, "fp32", "dapple", 4, {**TWO_STAGES, "strategy.data.zero": 1}),
    (
        ODD,
        "bf16",
        "dapple",
        4,
        {**TWO_STAGES, "strategy.data.zero": 3, "strategy.data.reduce": "microbatch"},
    ),
    ("tiny", "fp32", "zero-offload", 2, {}),
    ("tiny", "bf16", "zero-infinity", 2, {}),
    ("tiny-gpt", "bf16", "zero-offload", 1, {}),
    (ODD, "bf16", "zero-offload", 4, {"strategy.data.shard": 2}),
    ("tiny", "bf16", "zero-1", 2, {"strategy.data.offload": "optimizer"}),
    (ODD, "fp32", "zero-infinity", 2, {"strategy.recompute": "full"}),
    ("tiny", "bf16", "fsdp", 4, {"strategy.data.offload": "optimizer"}),
    ("tiny", "fp32", "zero-infinity", 2, OFFLOADED_INPUTS),
    ("tiny", "bf16", "single", 1, OFFLOADED_INPUTS),
    (ODD, "fp32", "dapple", 2, {**TWO_STAGES, **OFFLOADED_INPUTS}),
    ("tiny", "bf16", "zero-2", 1, {"strategy.data.bucket_mib": 0.02, **SHARE}),
    ("tiny", "bf16", "zero-2", 2, {"strategy.data.bucket_mib": 0.7, **SHARE}),
    ("tiny", "bf16", "zero-offload", 1, {"strategy.data.bucket_mib": 25.0}),
    ("tiny-gpt", "fp32", "zero-infinity", 2, {}),
    ("tiny", "fp32", "zero-3", 2, {**ONE_MICROBATCH, "strategy.data.reduce": "step"}),
    (ODD, "bf16", "zero-2", 2, {**ONE_MICROBATCH, "strategy.data.offload": "optimizer"}),
    ("tiny", "bf16", "zero-infinity", 1, {**TILES, "strategy.recompute": [0, 2]}),
    (ODD, "fp32", "zero-3", 2, {**TILES, "strategy.data.in_flight": 1}),
    ("tiny-gpt", "bf16", "fsdp", 4, {**TILES, "strategy.data.in_flight": 4, **RECOMPUTED_SHARD}),
]
TILED_13B: list[tuple[int, dict[str, Any]]] = [
    (8, {"training.sequence_length": 128}),
    (4, {"training.sequence_length": 1024, "strategy.recompute": "full"}),
    (8, {"training.sequence_length": 128, "strategy.data.in_flight": 3}),
]
"""(tiles of a linear, what else); with few tokens what is gathered and reduced decides the peak."""
WORKSPACE_BYTES = 64 * 2**20
"""Of the estimate's GPUs, `data/planner.yaml`."""
STATES = ("parameters", "gradients", "optimizer", "master", "gathered")


def largest(profile: Profile, rank: int) -> dict[tuple[str, str], int]:
    """(tier, category) -> its own largest in the last step."""
    rows = profile.memory
    rows = rows[
        (rows["rank"] == rank) & (rows.moment == "maximum") & (rows.step == rows.step.max())
    ]
    return {
        (t, c): b
        for t, c, b in zip(rows.tier, rows.category, rows["bytes"])
        if t == "host" or c in STATES
    }


def assert_is_the_engines(plan: Plan) -> None:
    """Peaks, states and collectives are those of a rehearsal."""
    estimated, rehearsed = estimate(plan), rehearse(plan)
    assert traffic(estimated) == traffic(rehearsed)
    assert estimated.peak_bytes_by_rank == pytest.approx(rehearsed.peak_bytes_by_rank, rel=0.02)
    for rank in set(rehearsed.representative.values()):
        # A fused optimizer counts its steps: four bytes a tensor.
        assert largest(estimated, rank) == pytest.approx(
            largest(rehearsed, rank), rel=0.02, abs=2048
        )


@pytest.mark.slow
@pytest.mark.drawn(9)
@pytest.mark.parametrize(("model", "precision", "strategy", "gpus", "changes"), CASES, ids=str)
def test_peaks_states_and_collectives_are_the_engines(
    model: Any, precision: str, strategy: str, gpus: int, changes: dict[str, Any]
) -> None:
    plan = small(model, strategy, gpus, precision).replace(**changes)
    assert_is_the_engines(plan)


THIRTEEN_B = ["opt-13b", "gpt3-13b", "pangu-13b", "llama-2-13b"]
OF_NO_TENSOR = ["fragmentation", "outside_allocator"]


@pytest.mark.parametrize("strategy", ["zero-offload", "zero-infinity"])
@pytest.mark.parametrize(
    "model",
    [THIRTEEN_B[0], *(pytest.param(name, marks=pytest.mark.slow) for name in THIRTEEN_B[1:])],
)
def test_offload_of_13b_on_one_gpu_peaks_where_the_engine_does(model: str, strategy: str) -> None:
    """Of four layers of each: what is left of the model is not sharded, and only adds to both."""
    settings = {
        "model.layers": 4,
        "training.sequence_length": 1024,
        "training.global_batch": 1,
        "strategy.precision": "fp16",
        "strategy.recompute": "full",
    }
    plan = Plan.of(model, gpu="v100-sxm2-32gb", gpus=1, strategy=strategy, set=settings)
    estimated, rehearsed = (device_peak(each(plan)) for each in (estimate, rehearse))
    assert estimated == pytest.approx(rehearsed, rel=0.02)


@pytest.mark.parametrize(
    ("tiles", "more"),
    [TILED_13B[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in TILED_13B[1:])],
)
def test_tiles_of_13b_peak_where_the_engine_does(tiles: int, more: dict[str, Any]) -> None:
    settings = {
        "model.layers": 4,
        "training.global_batch": 1,
        "strategy.precision": "fp16",
        "strategy.data.tile_factor": tiles,
    }
    plan = Plan.of(
        "llama-2-13b", gpu="v100-sxm2-32gb", gpus=1, strategy="zero-infinity", set=settings | more
    )
    estimated, rehearsed = estimate(plan), rehearse(plan)
    assert traffic(estimated) == traffic(rehearsed)
    assert device_peak(estimated) == pytest.approx(device_peak(rehearsed), rel=0.02)
    untiled = plan.replace(**{"strategy.data.tile_factor": 1})
    assert device_peak(estimated) < 0.7 * device_peak(estimate(untiled))


def device_peak(profile: Profile) -> int:
    """Bytes of tensors at the last step's peak; a rehearsal knows no workspaces nor drivers."""
    rows = profile.memory
    rows = rows[(rows.moment == "peak") & (rows.tier == "device") & (rows.step == rows.step.max())]
    workspaces = WORKSPACE_BYTES * (profile.source == "estimated")
    return int(rows[~rows.category.isin(OF_NO_TENSOR)]["bytes"].sum()) - workspaces
