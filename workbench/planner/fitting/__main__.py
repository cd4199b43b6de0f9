"""`python -m workbench.planner.fitting`: fit every multiplier of the cost model and write
`data/fitted.json`; with `--memory`, what readings of memory add, into `data/fitted_memory.json`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from workbench import data_files
from workbench.costmodel.rates.fitted_constants import FITTED_FILE
from workbench.costmodel.rates.fitted_memory import FITTED_MEMORY_FILE
from workbench.planner.fitting.fit_rows import clean_rows, fastest_steps, published_rows
from workbench.planner.fitting.memory_fit import kinds_of, memory_document, read_rows
from workbench.planner.fitting.multiplier_fit import (
    Array,
    Linearization,
    MultiplierFit,
    fit_all,
    fit_without_sites,
)
from workbench.planner.fitting.near_full import near_full_rows, near_full_slowdown_of
from workbench.planner.fitting.uncertainty_fit import (
    UNCERTAINTY_PARAMETERS,
    UncertaintyFit,
    well_known_frameworks,
)
from workbench.safe_io.files import replace_file

DIGITS = 5
NEAR_FULL_CONSTANTS = 1
SOURCE = "python -m workbench.planner.fitting, from data/validation/published.csv.gz"


def fit_document(fit: MultiplierFit, near: Linearization, point: Array) -> dict[str, Any]:
    """What `data/fitted.json` holds: the fit to all sites, those without each site, and the
    intervals that follow from these.
    """
    spread = UncertaintyFit(fit, near, point)
    return {
        "source": SOURCE,
        "fitted_constants": len(fit.names) + UNCERTAINTY_PARAMETERS + NEAR_FULL_CONSTANTS,
        **_fitted_part(spread, point, None),
        "near_full": near_full_slowdown_of(near_full_rows(fit.constants_at(point))),
        "without": {site: _without(spread, site) for site in sorted(set(fit.sites))},
        "measured": [step.to_list() for step in fastest_steps(fit.rows)],
    }


def _without(spread: UncertaintyFit, site: str) -> dict[str, Any]:
    fit, own = spread.fit, spread.fit.sites == site
    left = fit_without_sites(fit, spread.near, [site])
    errors = np.expm1(spread.near.at(left) - fit.measured)[own]
    return {
        "rows": int(own.sum()),
        "error": round(float(np.abs(errors).mean()), 4),
        **_fitted_part(spread, left, site),
    }


def _fitted_part(spread: UncertaintyFit, point: Array, without: str | None) -> dict[str, Any]:
    widths = asdict(spread.learnt(without))
    return {
        "constants": _logs(spread.fit, point),
        "uncertainty": {name: round(width, 4) for name, width in widths.items()},
        "well_known": sorted(well_known_frameworks(spread.fit, [without] if without else [])),
    }


def _logs(fit: MultiplierFit, point: Array) -> dict[str, float]:
    return {name: round(value, DIGITS) for name, value in fit.constants_at(point).logs if value}


def _as_text(document: Mapping[str, Any]) -> str:
    """JSON with a line for every measured step."""
    steps = ",\n  ".join(json.dumps(step) for step in document["measured"])
    text = json.dumps({**document, "measured": []}, indent=1)
    return text.replace('"measured": []', f'"measured": [\n  {steps}\n ]') + "\n"


def main() -> None:
    """Fit, and write the document."""
    parser = argparse.ArgumentParser(
        prog="python -m workbench.planner.fitting", description=__doc__
    )
    parser.add_argument("-o", "--output", type=Path, help=f"file to write, not {FITTED_FILE}")
    parser.add_argument(
        "--memory", action="store_true", help=f"fit readings of memory alone: {FITTED_MEMORY_FILE}"
    )
    arguments = parser.parse_args()
    usual = FITTED_MEMORY_FILE if arguments.memory else FITTED_FILE
    output = arguments.output or data_files.assets() / usual
    if output.is_dir() or not os.access(output.parent, os.W_OK):
        parser.error(
            f"--output: '{output}' cannot be written; legal: a file in a folder that exists"
        )
    if arguments.memory:
        _write_memory_fit(output)
        return
    fit = MultiplierFit(clean_rows(published_rows()))
    print(
        f"{len(fit.rows)} clean rows of {len(set(fit.sites))} sites, {len(fit.names)} multipliers"
    )
    near, point = fit_all(fit)
    document = fit_document(fit, near, point)
    replace_file(output, _as_text(document))
    print(f"written: {output}")


def _write_memory_fit(output: Path) -> None:
    rows = read_rows(published_rows())
    print(f"{len(rows)} readings of {len({one.site for one in rows})} sites: {kinds_of(rows)}")
    replace_file(output, json.dumps(memory_document(rows), indent=1) + "\n")
    print(f"written: {output}")


if __name__ == "__main__":
    main()
