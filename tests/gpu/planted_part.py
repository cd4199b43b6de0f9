"""A part whose checks pass, fail, raise, crash and hang on purpose."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.gpu.checks import Check, Evidence


def passes(evidence: Evidence) -> None:
    evidence.expect("one", True)
    evidence.expect("two", True, figure=2)
    if evidence.on_gpu("a CPU is none", "three"):
        evidence.expect("three", True)


def fails(evidence: Evidence) -> None:
    evidence.expect("wrong", False, figure=3)
    evidence.expect("right", True)


def raises(evidence: Evidence) -> None:
    evidence.expect("before", True)
    raise RuntimeError("on purpose")


def crashes(evidence: Evidence) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(evidence: Evidence) -> None:
    time.sleep(60)


def writes(evidence: Evidence) -> None:
    """Count its own runs in a file, if one is named."""
    path = os.environ.get("PLANTED_RUNS")
    if path:
        with Path(path).open("a") as file:
            file.write("x")
    evidence.expect("ran", True)


CHECKS = [
    Check("passes", passes, 5),
    Check("fails", fails, 5),
    Check("raises", raises, 5),
    Check("crashes", crashes, 5),
    Check("hangs", hangs, 0.3),
    Check("writes", writes, 5),
]
