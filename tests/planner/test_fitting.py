"""The fit of the cost model's multipliers: partial pooling, caps, intervals, and the committed
document against what the command writes.
"""

from __future__ import annotations

import math
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import workbench.planner.fitting.__main__ as fitting
from workbench.costmodel.rates.fitted_constants import fitted_document
from workbench.planner.fitting.__main__ import fit_document
from workbench.planner.fitting.fit_rows import FitRow, clean_rows, published_rows
from workbench.planner.fitting.multiplier_fit import (
    Linearization,
    MultiplierFit,
    fit_all,
    fit_without_sites,
)
from workbench.planner.fitting.near_full import near_full_slowdown_of
from workbench.planner.fitting.uncertainty_fit import UncertaintyFit, uncertainty
from workbench.planner.validation.error_metrics import MIN_SITE_ROWS

ROOT = Path(__file__).parents[2]
DRAWN_SITES = 3


@pytest.fixture(scope="module")
def rows() -> list[FitRow]:
    """Eight rows of each of six sites of two frameworks."""
    found: dict[str, list[FitRow]] = {}
    for row in clean_rows(published_rows()[149:494]):
        found.setdefault(row.site, []).append(row)
    sites = sorted(found, key=lambda site: (site.startswith("ist-daslab"), site))
    return [row for site in sites[:6] for row in found[site][:8]]


@pytest.fixture(scope="module")
def fit(rows: list[FitRow]) -> MultiplierFit:
    return MultiplierFit(rows)


@pytest.fixture(scope="module")
def near(fit: MultiplierFit) -> Linearization:
    return fit.linearize(np.zeros(len(fit.names)))


def test_a_planted_multiplier_is_found_up_to_its_prior(
    fit: MultiplierFit, near: Linearization
) -> None:
    planted = fit.prior_deviations
    exact = MultiplierFit(fit.rows)
    exact.__dict__["measured"] = near.at(planted)
    found = exact.solve(near, np.ones(len(fit.rows), dtype=bool))
    off = np.abs(near.at(found) - exact.measured)
    assert off.max() < 0.5 * np.abs(exact.measured - near.predicted).max()


def test_without_rows_every_multiplier_is_one(fit: MultiplierFit, near: Linearization) -> None:
    nothing = np.zeros(len(fit.rows), dtype=bool)
    assert fit.solve(near, nothing) == pytest.approx(0.0)


def test_a_site_of_many_rows_weighs_no_more_than_one_of_few(
    fit: MultiplierFit, near: Linearization
) -> None:
    first, every = fit.rows[0].site, np.ones(len(fit.rows), dtype=bool)
    chosen = [i for i, row in enumerate(fit.rows) if row.site == first]
    again = [*range(len(fit.rows)), *chosen * 5]
    repeated = MultiplierFit([fit.rows[i] for i in again])
    wider = Linearization(near.point, near.predicted[again], near.slopes[again])
    found = repeated.solve(wider, np.ones(len(again), dtype=bool))
    assert found == pytest.approx(fit.solve(near, every), abs=1e-6)


def test_a_left_out_site_has_no_part_in_its_fit(fit: MultiplierFit, near: Linearization) -> None:
    site = fit.rows[0].site
    changed = MultiplierFit(fit.rows)
    changed.__dict__["measured"] = np.where(fit.sites == site, fit.measured + 1.0, fit.measured)
    assert fit_without_sites(changed, near, [site]) == pytest.approx(
        fit_without_sites(fit, near, [site])
    )
    other = next(row.site for row in fit.rows if row.site != site)
    assert fit_without_sites(changed, near, [other]) != pytest.approx(
        fit_without_sites(fit, near, [other])
    )


def test_a_framework_of_few_sites_goes_half_of_its_way_at_most(
    fit: MultiplierFit, near: Linearization
) -> None:
    column = fit.names.index("framework.llm-foundry")
    own = fit.framework_of_row == "llm-foundry"
    one_site = own & (
        fit.sites == next(row.site for row in fit.rows if row.framework == "llm-foundry")
    )
    kept = one_site | ~own
    far = np.zeros(len(fit.names))
    far[column] = 3.0
    left = fit.measured[one_site] - near.predicted[one_site]
    capped = fit.capped(near, far, kept)[column]
    assert abs(capped) == pytest.approx(0.5 * abs(float(np.median(left))))
    assert fit.capped(near, far, ~own)[column] == 0.0
    assert fit.capped(near, far, np.ones(len(own), dtype=bool))[column] == 3.0


def test_an_interval_holds_nine_of_ten_and_widens_with_its_cause() -> None:
    """Errors of six sites whose spread is 5 %, and 30 % more of what waits."""
    draw = np.random.default_rng(0)
    waiting = draw.uniform(0.0, 1.0, 3000)
    causes = np.stack((np.ones(3000), np.zeros(3000), waiting, np.zeros(3000)))
    errors = draw.standard_normal(3000) * np.hypot(0.05, 0.3 * waiting)
    learnt = uncertainty(errors, causes, [f"site {i % 6}" for i in range(3000)])
    half = np.hypot(learnt.base, learnt.waiting * causes[2])
    held = np.abs(errors) <= half
    assert 0.88 <= held.mean() <= 0.92
    assert held[causes[2] < 0.2].mean() >= 0.8 and held[causes[2] > 0.8].mean() >= 0.8
    assert learnt.base == pytest.approx(1.645 * 0.05, rel=0.25)
    assert learnt.waiting == pytest.approx(1.645 * 0.3, rel=0.15)


def test_a_left_out_site_has_no_part_in_its_interval(
    fit: MultiplierFit, near: Linearization
) -> None:
    site, point = fit.rows[0].site, np.zeros(len(fit.names))
    changed = MultiplierFit(fit.rows)
    changed.__dict__["measured"] = np.where(fit.sites == site, fit.measured + 1.0, fit.measured)
    one, other = (UncertaintyFit(each, near, point).learnt(site) for each in (fit, changed))
    assert one == other
    assert (
        UncertaintyFit(changed, near, point).learnt() != UncertaintyFit(fit, near, point).learnt()
    )


def test_an_unknown_framework_is_wider_where_frameworks_differ(
    fit: MultiplierFit, near: Linearization
) -> None:
    """Two frameworks 30 % above and below what is predicted, alike at all of their sites: a fit
    without a site knows its framework from the others, one without the framework does not.
    """
    planted = MultiplierFit(fit.rows)
    first = fit.framework_of_row == "llm-foundry"
    planted.__dict__["measured"] = near.predicted + np.where(first, 0.3, -0.3)
    spread = UncertaintyFit(planted, near, np.zeros(len(fit.names)))
    at = np.flatnonzero(fit.sites == fit.rows[0].site)
    own = fit.rows[0].framework
    assert not spread.causes(at, [fit.rows[0].site])[1].any()
    assert spread.causes(at, [fit.rows[0].site], own)[1].all()
    learnt = spread.learnt()
    assert learnt.unknown_framework > learnt.base


def test_a_left_out_framework_has_no_part_in_its_fit(
    fit: MultiplierFit, near: Linearization
) -> None:
    own, column = fit.rows[0].framework, fit.names.index(f"framework.{fit.rows[0].framework}")
    changed = MultiplierFit(fit.rows)
    moved = fit.framework_of_row == own
    changed.__dict__["measured"] = np.where(moved, fit.measured + 1.0, fit.measured)
    one, other = (fit_without_sites(each, near, [], own) for each in (fit, changed))
    assert one == pytest.approx(other) and one[column] == 0.0


def test_the_documented_errors_are_those_of_the_fit() -> None:
    text = (ROOT / "docs/cost_model.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^\| (\S+/\S+/\S+) \|.*\| ([\d.]+) % \|$", text, re.MULTILINE))
    stored = {
        site: f"{100 * entry['error']:.1f}"
        for site, entry in fitted_document()["without"].items()
        if entry["rows"] >= MIN_SITE_ROWS
    }
    assert shown == stored
    errors = [float(one) for one in stored.values()]
    for what, value in (("mean", np.mean(errors)), ("median", np.median(errors))):
        found = re.search(rf"\*\*{what} over sites\*\*.*\*\*([\d.]+) %\*\*", text)
        assert found and float(found.group(1)) == pytest.approx(float(value), abs=0.1)


@pytest.mark.slow
def test_the_committed_document_is_what_the_command_writes() -> None:
    """The whole fit again, and three drawn sites left out of it."""
    fit = MultiplierFit(clean_rows(published_rows()))
    near, point = fit_all(fit)
    committed = fitted_document()
    assert dict(fit.constants_at(point).logs) == pytest.approx(
        dict.fromkeys(fit.names, 0.0) | committed["constants"], abs=2e-5
    )
    drawn = random.Random(len(fit.rows)).sample(sorted(committed["without"]), DRAWN_SITES)
    for site in drawn:
        left = dict(fit.constants_at(fit_without_sites(fit, near, [site])).logs)
        stored = committed["without"][site]["constants"]
        assert {name: value for name, value in left.items() if name in stored} == pytest.approx(
            stored, abs=2e-5
        )
    again = fit_document(fit, near, point)
    for part, stored in (
        (again, committed),
        *((again["without"][x], committed["without"][x]) for x in drawn),
    ):
        assert part["uncertainty"] == pytest.approx(stored["uncertainty"], rel=0.02, abs=2e-3)
        assert part["well_known"] == stored["well_known"]


def test_the_slowdown_of_a_full_gpu_goes_half_of_its_way_below_three_sites() -> None:
    logs = [math.log(4.0), math.log(5.0), math.log(3.0)]
    one = near_full_slowdown_of({"a": logs})
    assert one["slowdown"] == pytest.approx(2.0, abs=1e-3) and one["rows"] == 3
    three = near_full_slowdown_of({"a": logs, "b": logs, "c": [*logs, *logs]})
    assert three["slowdown"] == pytest.approx(4.0, abs=1e-3) and three["sites"] == ["a", "b", "c"]
    assert near_full_slowdown_of({})["slowdown"] == 1.0
    assert near_full_slowdown_of({"a": [-1.0]})["slowdown"] == 1.0


@pytest.mark.parametrize("memory", [[], ["--memory"]])
@pytest.mark.parametrize("target", ["missing/fitted.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_fitted(
    memory: list[str],
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(fitting, "published_rows", lambda: pytest.fail("it fits"))
    monkeypatch.setattr(sys, "argv", ["fitting", "-o", str(tmp_path / target), *memory])
    with pytest.raises(SystemExit, match="2"):
        fitting.main()
    assert "legal: a file in a folder that exists" in capsys.readouterr().err


def test_a_document_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit that dies while it writes leaves the document that was there."""
    target = tmp_path / "fitted.json"
    target.write_text("{}")

    def die(*_: object) -> None:
        raise OSError("killed")

    monkeypatch.setattr(fitting, "published_rows", lambda: [])
    monkeypatch.setattr(fitting, "memory_document", lambda _: {"a": 1})
    monkeypatch.setattr(sys, "argv", ["fitting", "-o", str(target), "--memory"])
    monkeypatch.setattr("workbench.safe_io.files.os.replace", die)
    with pytest.raises(OSError, match="killed"):
        fitting.main()
    assert target.read_text() == "{}" and list(tmp_path.iterdir()) == [target]
