"""`python -m workbench.planner.fitting`: fit every multiplier of the cost model and write
`data/fitted.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from workbench import data_files
from workbench.costmodel.rates.fitted_constants import FITTED_FILE
from workbench.planner.fitting.fit_rows import clean_rows, fastest_steps, published_rows
from workbench.planner.fitting.multiplier_fit import (
    Array,
    Linearization,
    MultiplierFit,
    fit_all,
    fit_without_site,
)
from workbench.planner.fitting.site_intervals import intervals

DIGITS = 5
SOURCE = "python -m workbench.planner.fitting, from data/validation/published.csv.gz"


def fit_document(fit: MultiplierFit, near: Linearization, point: Array) -> dict[str, Any]:
    """What `data/fitted.json` holds: the fit to all sites, those without each site, and the
    intervals that follow from these.
    """
    without = {site: fit_without_site(fit, near, site) for site in sorted(set(fit.sites))}
    errors = np.empty(len(fit.rows))
    for site, left in without.items():
        at = fit.sites == site
        errors[at] = (fit.measured - near.at(left))[at]
    found = {}
    for site, left in without.items():
        others = fit.sites != site
        found[site] = {
            "rows": int((~others).sum()),
            "error": round(float(np.abs(np.expm1(-errors[~others])).mean()), 4),
            "constants": _logs(fit, left),
            "intervals": _rounded(
                intervals(errors[others], fit.framework_of_row[others], fit.sites[others])
            ),
        }
    return {
        "source": SOURCE,
        "fitted_constants": len(fit.names),
        "constants": _logs(fit, point),
        "intervals": _rounded(intervals(errors, fit.framework_of_row, fit.sites)),
        "without": found,
        "measured": [step.to_list() for step in fastest_steps(fit.rows)],
    }


def _logs(fit: MultiplierFit, point: Array) -> dict[str, float]:
    return {name: round(value, DIGITS) for name, value in fit.constants_at(point).logs if value}


def _rounded(found: Mapping[str, tuple[float, float]]) -> dict[str, list[float]]:
    return {name: [round(low, 4), round(high, 4)] for name, (low, high) in found.items()}


def _as_text(document: Mapping[str, Any]) -> str:
    """JSON with a line for every measured step."""
    steps = ",\n  ".join(json.dumps(step) for step in document["measured"])
    text = json.dumps({**document, "measured": []}, indent=1)
    return text.replace('"measured": []', f'"measured": [\n  {steps}\n ]') + "\n"


def main() -> None:
    """Fit, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=data_files.assets() / FITTED_FILE)
    arguments = parser.parse_args()
    fit = MultiplierFit(clean_rows(published_rows()))
    print(
        f"{len(fit.rows)} clean rows of {len(set(fit.sites))} sites, {len(fit.names)} multipliers"
    )
    near, point = fit_all(fit)
    document = fit_document(fit, near, point)
    arguments.output.write_text(_as_text(document), encoding="utf-8")
    print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
