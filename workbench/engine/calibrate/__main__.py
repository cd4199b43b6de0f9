"""Subprocess entry point: `python -m workbench.engine.calibrate --seconds 90 --to FILE`.

Writes the calibration file, and prints its progress as lines of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from workbench.engine.calibrate.measure import calibrate
from workbench.engine.exit_codes import exit_status
from workbench.machine.calibration_file import write_calibration


def main() -> int:
    """Measure and write; exit code 2 where this machine cannot be measured, 1 if a rank failed."""
    parser = argparse.ArgumentParser(prog="python -m workbench.engine.calibrate")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    def progress(spent: float, words: str) -> None:
        print(json.dumps({"done": spent, "of": arguments.seconds, "words": words}), flush=True)

    return exit_status(
        lambda: write_calibration(calibrate(arguments.seconds, progress), arguments.to)
    )


if __name__ == "__main__":
    sys.exit(main())
