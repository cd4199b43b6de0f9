"""13 G parameters on one V100: estimate beside what was published and what rehearsal counts."""

from pathlib import Path

import pytest

import workbench as wb
from tests.benchmarks.offload_published import LARGEST, SPEEDS, STACKS
from workbench.planner.calibrated_plan import with_calibration

DOCS = (Path(__file__).parents[2] / "docs/strategies.md").read_text()
ROWS = [line.split("|") for line in DOCS.splitlines() if line.startswith("|")]
SAID = {row[1].strip(): (row[3].strip(), row[4].strip()) for row in ROWS if len(row) > 5}
SPEED_ROWS = (
    "10 G parameters, batch 10: seconds a step",
    "the same, TFLOP/s with recomputation",
    "the same, TFLOP/s with recomputation",
    "13 G, batch 4: TFLOP/s",
)
LARGEST_ROWS = (
    "largest model, G parameters: data parallelism",
    "`zero-offload`",
    "`zero-infinity`, 1.5 TB of host memory",
)


def test_the_page_says_what_is_estimated_beside_published_figures() -> None:
    cases = [
        *zip(SPEED_ROWS, (speed.estimated for speed in SPEEDS), strict=True),
        *zip(LARGEST_ROWS, (largest.estimated for largest in LARGEST), strict=True),
    ]
    for row, estimated in cases:
        assert SAID[row] == tuple(f"{estimated(stack):.1f}" for stack in STACKS)


def test_the_published_profile_is_near_the_published_steps() -> None:
    step, _, _, of_13b = (speed.estimated("deepspeed-zero") for speed in SPEEDS)
    assert step == pytest.approx(SPEEDS[0].published, rel=0.1)
    assert of_13b == pytest.approx(SPEEDS[3].published, rel=0.1)


def test_the_largest_published_models_fit() -> None:
    for stack in STACKS:
        assert all(one.estimated(stack) > float(one.published) for one in LARGEST)


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize("strategy", ["zero-offload", "zero-infinity"])
@pytest.mark.parametrize("model", ["opt-13b", "gpt3-13b", "pangu-13b", "llama-2-13b"])
def test_13b_is_rehearsed_as_it_is_estimated(model: str, strategy: str) -> None:
    settings = {
        "strategy.recompute": "full",
        "strategy.precision": "fp16",
        "training.sequence_length": 1024,
        "training.micro_batch": 1,
        "training.global_batch": 1,
    }
    plan = wb.Plan.of(model, gpu="v100-sxm2-32gb", gpus=1, strategy=strategy, set=settings)
    estimated, rehearsed = wb.estimate(plan), wb.rehearse(plan)
    assert estimated.fits and rehearsed.fits and rehearsed.notes["left_out"]
    workspaces = with_calibration(plan.resolve())[1].workspace_mib * 2**20  # which none rehearses
    allocated = max(estimated.peak_allocated_by_rank.values()) - workspaces
    assert max(rehearsed.peak_allocated_by_rank.values()) == pytest.approx(allocated, rel=0.02)
    assert rehearsed.host_bytes == pytest.approx(estimated.host_bytes, rel=0.02)
    found = wb.search(plan, top=20, where=["strategy.recompute=full"]).top
    offload = plan.resolve().strategy.data.offload
    peak = next(c.peak_bytes for c in found if c.plan.strategy.data.offload == offload)
    assert peak == pytest.approx(max(estimated.peak_bytes_by_rank.values()), rel=1e-6)
