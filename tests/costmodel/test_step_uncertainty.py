"""The interval of a step time: what widens it, and what a row of one's own is worth."""

from __future__ import annotations

import math

import pytest

from workbench.costmodel.inputs.rank_workload import workload
from workbench.costmodel.rates.constants import constants
from workbench.costmodel.rates.fitted_constants import fitted_document
from workbench.costmodel.rates.step_uncertainty import (
    StepSituation,
    StepUncertainty,
    is_well_known,
    step_uncertainty,
)
from workbench.costmodel.step_time import step_time, waiting_share
from workbench.plan.schema import Plan
from workbench.planner import estimate

LEARNT = StepUncertainty(0.1, 0.05, 0.5, 0.08)


def test_causes_add_up_by_their_squares() -> None:
    near = StepSituation(False, 0.0, 0.0)
    assert LEARNT.half_width(near) == pytest.approx(0.1)
    far = StepSituation(True, 0.2, 2.0)
    assert LEARNT.half_width(far) == pytest.approx(math.hypot(0.1, 0.05, 0.1, 0.16))
    low, high = LEARNT.interval(far)
    assert low * high == pytest.approx(1.0) and low < 1 < high


def test_a_row_of_ones_own_leaves_neither_unknown_nor_far() -> None:
    after = StepSituation(True, 0.2, 2.0, after_own_row=True)
    assert LEARNT.half_width(after) == pytest.approx(math.hypot(0.1, 0.1))


def test_the_published_interval_widens_with_waiting_and_distance() -> None:
    published = step_uncertainty()
    assert min(published.base, published.waiting, published.octave) > 0
    assert step_uncertainty("no such site") == published
    site = next(iter(fitted_document()["without"]))
    assert step_uncertainty(site) != published


def test_a_framework_of_three_sites_is_well_known() -> None:
    assert is_well_known("llmq") and is_well_known("megatron-bridge-26.04")
    assert not is_well_known("torchtune") and not is_well_known("textbook")


def test_a_step_without_networks_or_stages_waits_for_its_end_alone() -> None:
    alone = Plan.of("llama-3-8b", gpu="b200", gpus=1, strategy="single").resolve()
    w = workload(alone)
    time = step_time(w, constants(alone.gpu, "fused"))
    rest = sum(float(part) for part in time.after.values()) + float(time.durations.idle.sum())
    assert waiting_share(w, time) == pytest.approx(rest / float(time.seconds))


def test_an_estimate_far_from_everything_measured_says_more() -> None:
    def width(gpus: int) -> float:
        plan = Plan.of(
            "llama-3-8b",
            gpu="h100-sxm-80gb",
            gpus=gpus,
            strategy="zero-3",
            set={"training.sequence_length": 2048},
        ).replace(**{"strategy.stack": "llm-foundry"})
        low, high = estimate(plan).notes["step_seconds_90"]
        return float(high / low)

    assert width(64) < width(16384)
