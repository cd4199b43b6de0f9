"""Subprocess entry point: `python -m workbench.engine.layer_times PLAN --to FILE --seconds 20`.

Writes the layer profile, and prints its progress as lines of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from workbench.engine.exit_codes import exit_status
from workbench.engine.layer_times.measure import measure_layers
from workbench.plan.model.layer_profile_csv import write_layer_profile
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan


def profile_layers(plan: Plan, to: Path, seconds: float, allow_code: bool) -> None:
    """Measure the plan of one device, and write its layer profile."""

    def progress(spent: float, words: str) -> None:
        print(json.dumps({"done": spent, "of": seconds, "words": words}), flush=True)

    full = plan.resolve()
    require(full, "run", allow_code)
    write_layer_profile(measure_layers(full, seconds, progress), to)


def main() -> int:
    """Exit code 0, or 2 with the problems on stderr."""
    parser = argparse.ArgumentParser(prog="python -m workbench.engine.layer_times")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--allow-code", action="store_true")
    a = parser.parse_args()
    return exit_status(lambda: profile_layers(Plan.load(a.plan), a.to, a.seconds, a.allow_code))


if __name__ == "__main__":
    sys.exit(main())
