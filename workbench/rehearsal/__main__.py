"""`python -m workbench.rehearsal PLAN --to FOLDER [--ranks 0,1] [--operators] [--over-time]
[--check]`: rehearse in a process of its own.

Writes the profile into FOLDER, or with `--check` the order of calls as `order.json`; prints a line
of JSON after each action that has run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path

import torch

from workbench.plan.schema import Plan
from workbench.rehearsal.order_check import check_order
from workbench.rehearsal.rehearse import rehearse
from workbench.runs.launch.subprocess_verbs import ORDER_FILE


def main() -> int:
    """Rehearse the plan; 2 with one line on stderr where it cannot be."""
    parser = argparse.ArgumentParser(prog="python -m workbench.rehearsal")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--ranks", type=lambda text: [int(x) for x in text.split(",")])
    parser.add_argument("--allow-code", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--operators", action="store_true")
    parser.add_argument("--over-time", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # torch itself is no garbage, and takes a tenth of the time to look through

    def progress(done: int, of: int) -> None:
        print(json.dumps({"done": done, "of": of}), flush=True)

    try:
        plan = Plan.load(arguments.plan)
        if arguments.check:
            order = check_order(plan, progress, arguments.allow_code).json()
            arguments.to.mkdir(parents=True)
            (arguments.to / ORDER_FILE).write_text(json.dumps(order))
        else:
            found = rehearse(
                plan,
                arguments.ranks,
                progress,
                arguments.allow_code,
                arguments.operators,
                arguments.over_time,
            )
            found.save(arguments.to)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
