"""Step time against a seeded sample of published steps: thresholds that accuracy may not fall
below.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from workbench.planner.validation import Validation, error_metrics, validate

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found() -> Validation:
    return validate([ROOT / "data/validation/time.csv"])


def errors(found: Validation, stack: str | None = None) -> dict[str, Any]:
    table = found.table[found.table.measured_s.notna()]
    chosen = table if stack is None else table[table["stack"] == stack]
    return error_metrics.relative_errors(chosen.predicted_s, chosen.measured_s, list(chosen.row))


def test_every_row_is_expressed(found: Validation) -> None:
    assert found.expressed == found.rows == 205


@pytest.mark.parametrize(
    ("stack", "mape", "median"),
    [
        ("llm-foundry", 0.075, 0.065),
        ("deepspeed-3d", 0.065, 0.055),
        ("nemo", 0.05, 0.04),
        ("internevo", 0.045, 0.045),
        ("torchtitan", 0.08, 0.07),
        ("deepspeed-zero", 0.09, 0.07),
        ("llmq", 0.11, 0.05),
        ("megatron-bridge", 0.085, 0.055),
        ("nanotron", 0.095, 0.065),
    ],
)
def test_errors_of_a_stack_stay_where_they_are(
    found: Validation, stack: str, mape: float, median: float
) -> None:
    of_stack = errors(found, stack)
    assert of_stack["mape"] <= mape and of_stack["median_ape"] <= median


def test_errors_of_all_stay_where_they_are(found: Validation) -> None:
    assert errors(found)["mape"] <= 0.10
    assert errors(found)["median_ape"] <= 0.065
    assert abs(errors(found)["median_bias"]) <= 0.03


def test_the_textbook_stays_in_the_middle_of_the_stacks() -> None:
    table = validate([ROOT / "data/validation/time.csv"], profile="textbook").table
    clean = table[table.measured_s.notna() & table.clean]
    error = error_metrics.relative_errors(clean.predicted_s, clean.measured_s)
    assert error["mape"] <= 0.20
    assert error["median_ape"] <= 0.12
    assert abs(error["median_bias"]) <= 0.05


def test_nine_of_ten_steps_lie_in_the_interval(found: Validation) -> None:
    table = found.table[found.table.measured_s.notna()]
    assert (
        0.85
        <= error_metrics.interval_coverage(table.measured_s, table.s_low, table.s_high)["inside"]
        <= 0.95
    )


def test_no_constant_is_keyed_by_a_model_or_a_source() -> None:
    """Framework profiles and generations of GPUs have constants; models, papers and pages have
    none.
    """
    models = set(yaml.safe_load((ROOT / "data/models.yaml").read_text()))
    for name in ("planner.yaml", "stacks.yaml"):
        keys: set[str] = set()

        def walk(entry: Any, keys: set[str] = keys) -> None:
            if isinstance(entry, dict):
                keys |= {str(key).lower() for key in entry}
                for value in entry.values():
                    walk(value)

        walk(yaml.safe_load((ROOT / "data" / name).read_text()))
        assert not keys & {model.lower() for model in models}
        assert not [
            key for key in keys if "github" in key or "http" in key or key.startswith("arxiv")
        ]
