"""`python -m workbench.engine.calibrate --seconds 60 --to FILE`: measure in a process of its own.

Writes the calibration file; prints a line of JSON after each round of points.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from workbench.engine.calibrate.measure import calibrate
from workbench.engine.exit_codes import exit_status
from workbench.machine.calibration_file import write


def main() -> int:
    """Measure and write; 2 with one line on stderr where this machine cannot be measured, 1 where a
    rank failed.
    """
    parser = argparse.ArgumentParser(prog="python -m workbench.engine.calibrate")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    def progress(spent: float, words: str) -> None:
        print(json.dumps({"done": spent, "of": arguments.seconds, "words": words}), flush=True)

    return exit_status(lambda: write(calibrate(arguments.seconds, progress), arguments.to))


if __name__ == "__main__":
    sys.exit(main())
