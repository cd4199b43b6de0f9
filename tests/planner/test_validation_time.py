"""Step time against published steps: every fourth clean row of each site, predicted by the fit that
has not seen the site.
"""

from __future__ import annotations

import csv
import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from workbench.costmodel.rates.fitted_constants import fitted_document
from workbench.costmodel.rates.fitted_memory import fitted_memory_document
from workbench.planner.validation import Validation, validate
from workbench.planner.validation.left_out_report import left_out_summary
from workbench.planner.validation.row_judgement import published_judgements

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "data/validation/published.csv.gz"
MOST_ROWS = 30
"""Rows of a site beyond which the sample takes every n-th."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Validation:
    judged = published_judgements()
    with gzip.open(PUBLISHED, "rt", encoding="utf-8", newline="") as file:
        table = csv.DictReader(file)
        names = list(table.fieldnames or [])
        rows = [row for row in table if not judged[row["id"]].flags and row["status"] == "ok"]
    size = Counter(judged[row["id"]].site for row in rows)
    seen: Counter[str] = Counter()
    path = tmp_path_factory.mktemp("sample") / "sample.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        written = csv.DictWriter(file, names)
        written.writeheader()
        for row in rows:
            site = judged[row["id"]].site
            if seen[site] % max(1, size[site] // MOST_ROWS) == 0:
                written.writerow(row)
            seen[site] += 1
    return validate([path])


def test_errors_on_left_out_sites_stay_where_they_are(found: Validation) -> None:
    left = left_out_summary(found.table)
    assert left["mean_over_sites"] <= 0.115 and left["median_over_sites"] <= 0.095
    assert len(left["sites"]) >= 19


def test_the_bias_of_a_site_is_its_mean_error_as_in_every_other_table(found: Validation) -> None:
    rows = found.table[found.table.clean & found.table.measured_s.notna()]
    errors = (rows.left_out_s / rows.measured_s - 1).astype(float)
    means = errors.groupby(rows.site).mean()
    for one in left_out_summary(found.table)["sites"]:
        assert one["left_out_bias"] == pytest.approx(means[one["site"]])


def test_what_a_fit_has_not_seen_it_predicts_worse(found: Validation) -> None:
    left = left_out_summary(found.table)
    assert left["in_sample_mean_over_sites"] < left["mean_over_sites"]


def test_a_published_row_of_another_site_counts_as_ones_own(tmp_path: Path) -> None:
    """An id alone does not make a row a published one."""
    with gzip.open(PUBLISHED, "rt", encoding="utf-8", newline="") as file:
        table = csv.DictReader(file)
        row = next(row for row in table if row["id"] == "llmf-0001")
        path = tmp_path / "own.csv"
        with path.open("w", encoding="utf-8", newline="") as copy:
            written = csv.DictWriter(copy, list(table.fieldnames or []))
            written.writeheader()
            written.writerow(row | {"source": "somebody's own log"})
    own = validate([path])
    assert list(own.table.site) == [""] and left_out_summary(own.table) == {}
    assert own.table.predicted_s.notna().all()


def test_no_more_is_fitted_than_is_allowed(found: Validation) -> None:
    document, memory = fitted_document(), fitted_memory_document()
    counted = document["fitted_constants"] + memory["fitted_constants"]
    assert counted == left_out_summary(found.table)["fitted_constants"] <= 25
    for part in (document, *document["without"].values()):
        assert all(abs(value) < 0.7 for value in part["constants"].values())


def test_the_textbook_is_physics_without_a_multiplier() -> None:
    assert "framework.textbook" not in fitted_document()["constants"]


def test_no_constant_is_keyed_by_a_model_or_a_source() -> None:
    """Framework profiles and generations of GPUs have constants; models, papers and pages have
    none.
    """
    models = set(yaml.safe_load((ROOT / "data/models.yaml").read_text()))
    profiles = sorted((ROOT / "data/frameworks").glob("*.yaml"))
    for path in (ROOT / "data/planner.yaml", *profiles):
        keys: set[str] = set()

        def walk(entry: Any, keys: set[str] = keys) -> None:
            if isinstance(entry, dict):
                keys |= {str(key).lower() for key in entry}
                for value in entry.values():
                    walk(value)

        walk(yaml.safe_load(path.read_text()))
        assert not keys & {model.lower() for model in models}
        assert not [
            key for key in keys if "github" in key or "http" in key or key.startswith("arxiv")
        ]
