"""The fit of readings of memory: that it is the committed one, and what it does with rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from workbench.costmodel.memory.reported_memory import ReportedMemory
from workbench.costmodel.rates.fitted_memory import (
    fitted_memory_document,
    memory_fit_of,
    memory_fit_without,
    published_memory_fit,
)
from workbench.planner.fitting.fit_rows import published_rows
from workbench.planner.fitting.memory_fit import (
    ReadRow,
    fit_slack,
    memory_document,
    memory_fit,
    read_rows,
    spread,
)
from workbench.planner.validation.implied_fields.first_step_readings import reads_first_step
from workbench.planner.validation.memory_report import (
    APART,
    CERTAIN,
    failure_ranking,
    memory_errors_by_kind,
)
from workbench.planner.validation.row_judgement import contradicts_memory

GIB = 2.0**30


@pytest.fixture(scope="module")
def rows() -> list[ReadRow]:
    return read_rows(published_rows())


def test_the_committed_fit_is_what_the_command_writes(rows: list[ReadRow]) -> None:
    assert memory_document(rows) == fitted_memory_document()


def test_a_left_out_site_has_no_part_in_its_fit(rows: list[ReadRow]) -> None:
    site = "meta/grand-teton/h100-sxm-96gb"
    others = [one for one in rows if one.site != site]
    assert len(others) < len(rows)
    assert memory_fit_of(memory_fit(others).to_dict()) == memory_fit_without(site)
    assert memory_fit_without(site) != published_memory_fit()
    assert memory_fit_without("a site of nobody") == published_memory_fit()


def test_nothing_is_fitted_to_pages_that_contradict_themselves(rows: list[ReadRow]) -> None:
    assert not any(contradicts_memory(one.row.source) for one in rows)
    assert any(contradicts_memory(row.source) for row in published_rows())


def test_what_is_fitted_to_memory_is_counted() -> None:
    """The slack, and three quantiles each for named and unnamed frameworks."""
    assert fitted_memory_document()["fitted_constants"] == 7
    assert 0 < published_memory_fit().slack < 0.25


def test_sites_weigh_alike_in_the_spread() -> None:
    """Of a site of ninety rows and one of three, each gives half of the weight."""
    errors = [0.0] * 90 + [1.0] * 3
    low, middle, high = spread(errors, ["a"] * 90 + ["b"] * 3)
    assert low == pytest.approx(1.0)
    assert 1.0 < middle < np.e
    assert high == pytest.approx(np.e)


def test_sites_of_fewer_than_three_rows_have_no_part_in_the_spread() -> None:
    assert spread([0.0, 0.0, 0.0, 5.0], ["a", "a", "a", "b"]) == pytest.approx((1.0, 1.0, 1.0))


def test_sites_of_fewer_than_three_rows_have_no_part_in_the_slack(rows: list[ReadRow]) -> None:
    small = [one for one in rows if one.site == "trainy/whitefiber/h200-sxm-141gb"]
    assert len(small) == 2
    assert fit_slack(rows) == fit_slack([one for one in rows if one not in small])
    assert fit_slack(small) == 0.0


def test_reserved_memory_never_exceeds_what_is_left_of_the_gpu() -> None:
    part = np.array([10.0])
    shown = ReportedMemory(part * GIB, 4 * part * GIB, part * GIB / 10, 20 * GIB, part * GIB / 2)
    assert shown.readings(0.1)["reserved"] == 19 * GIB
    assert shown.readings(0.1, waiting=0.0)["reserved"] == pytest.approx(11 * GIB)
    assert shown.readings(0.1)["nvidia-smi"] == 20 * GIB
    assert shown.readings(0.0, factor=2.5)["allocated"] == 25 * GIB
    assert shown.in_first_step().readings(0.0)["allocated"] == 5 * GIB


def test_pages_of_a_first_step_are_known_by_source_and_model() -> None:
    """Readings of the same page that came after the log reported a second step are not."""
    page = "github:NVIDIA-NeMo/Megatron-Bridge skills/nemo-mbridge-perf-memory-tuning/SKILL.md"
    assert reads_first_step(page, "Llama-3-70B SFT")
    assert not reads_first_step(page, "Moonlight-16B-A3B")
    assert not reads_first_step("measured.csv", "Llama-3-70B SFT")


def table(**columns: Any) -> pd.DataFrame:
    size = len(next(iter(columns.values())))
    usual = {
        "row": [str(index) for index in range(size)],
        "source": [""] * size,
        "site": [""] * size,
        "profile": ["nanotron"] * size,
        "status": ["ran"] * size,
        "unfit": [False] * size,
        "memory_kind": ["unknown"] * size,
        "gib_low": [0.0] * size,
        "gib_high": [100.0] * size,
    }
    return pd.DataFrame({**usual, **columns})


def test_a_reading_inside_its_range_has_no_error() -> None:
    found = memory_errors_by_kind(
        table(
            measured_gib=[10.0, 12.0, 20.0],
            gib_from=[8.0, 12.0, 10.0],
            gib_to=[11.0, 15.0, 16.0],
            predicted_gib=[11.0, 15.0, 16.0],
        )
    )
    assert found["unknown"]["mape"] == pytest.approx(0.2 / 3)
    assert found["unknown, likely reading"]["mape"] == pytest.approx((0.1 + 0.25 + 0.2) / 3)


def test_rows_whose_page_leaves_their_model_out_are_shown_apart() -> None:
    found = memory_errors_by_kind(
        table(
            measured_gib=[10.0, 10.0],
            gib_from=[11.0, 15.0],
            gib_to=[11.0, 15.0],
            predicted_gib=[11.0, 15.0],
            memory_kind=["reserved", "reserved"],
            unfit=[False, True],
        )
    )
    assert found["reserved"]["mape"] == pytest.approx(0.3)
    assert found[f"reserved, {CERTAIN}"]["mape"] == pytest.approx(0.1)


def test_contradictory_pages_are_listed_apart() -> None:
    source = "github:Lightning-AI/litgpt config_hub/finetune"
    found = memory_errors_by_kind(
        table(
            measured_gib=[10.0, 10.0],
            gib_from=[10.0, 30.0],
            gib_to=[10.0, 30.0],
            predicted_gib=[10.0, 30.0],
            memory_kind=["allocated", "allocated"],
            source=["somewhere", source],
        )
    )
    assert found["allocated"]["mape"] == 0.0
    assert found[APART]["mape"] == pytest.approx(2.0)


def test_failures_are_ranked_by_the_memory_that_they_need() -> None:
    """Of four pairs of a failed and a run row one is in the wrong order, and one is a tie."""
    found = failure_ranking(
        table(
            status=["failed", "failed", "ran", "ran", "out_of_memory"],
            needed_gib=[90.0, 60.0, 70.0, 60.0, 10.0],
            card_gib=[80.0] * 5,
        )
    )
    assert found["area"] == pytest.approx((1 + 1 + 0 + 0.5) / 4)
    assert failure_ranking(table(needed_gib=[1.0], card_gib=[1.0]))["area"] is None
