"""Entry point of a rank, which `accelerate launch` starts.

`python -m workbench.engine.worker RUN/plan.yaml [--allow-code]`
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from workbench.interop.launch_environment import allocator_environment
from workbench.runs.launch.parent_death import die_with_parent


def main() -> int:
    """Train the plan named on the command line; the run directory is the plan's folder."""
    die_with_parent()
    if os.environ.get("ACCELERATE_USE_CPU") != "true":
        # torch reads them when it is imported.
        os.environ.update(allocator_environment(version("torch"), os.environ))
    # Imported only now: torch takes seconds, in which a launcher may already have died.
    from workbench.engine.worker_lifecycle import train

    plan, *options = sys.argv[1:] or [""]
    if not plan or options not in ([], ["--allow-code"]):
        print(
            "usage: python -m workbench.engine.worker RUN/plan.yaml [--allow-code]", file=sys.stderr
        )
        return 2
    return train(Path(plan).resolve(), allow_code=bool(options))


def flush() -> None:
    """Flush stdout and stderr. A launcher's log on a full disk does not fail the training."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()


if __name__ == "__main__":
    status = main()
    flush()
    # Everything is written and closed. A regular interpreter shutdown would race the threads of
    # gloo or NCCL, which may abort the process.
    os._exit(status)
