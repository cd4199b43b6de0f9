"""ZeRO: the estimate against the real engine on fake tensors, peaks, states by category and every
collective.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.costmodel.test_against_rehearsal import ODD, small, traffic
from workbench.planner import estimate
from workbench.profile import Profile
from workbench.rehearsal.rehearse import rehearse

TWO_STAGES = {"strategy.pipeline.size": 2}
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
]
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


@pytest.mark.slow
@pytest.mark.drawn(7)
@pytest.mark.parametrize(("model", "precision", "strategy", "gpus", "changes"), CASES, ids=str)
def test_peaks_states_and_collectives_are_the_engines(
    model: Any, precision: str, strategy: str, gpus: int, changes: dict[str, Any]
) -> None:
    plan = small(model, strategy, gpus, precision).replace(**changes)
    estimated, rehearsed = estimate(plan), rehearse(plan)
    assert traffic(estimated) == traffic(rehearsed)
    assert estimated.peak_bytes_by_rank == pytest.approx(rehearsed.peak_bytes_by_rank, rel=0.02)
    for rank in set(rehearsed.representative.values()):
        # A fused optimizer counts its steps: four bytes a tensor.
        assert largest(estimated, rank) == pytest.approx(
            largest(rehearsed, rank), rel=0.02, abs=2048
        )
