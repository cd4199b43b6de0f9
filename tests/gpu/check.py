"""`python -m tests.gpu.check [--budget S] [--resume FILE]* [--dry] [--gpus N] [--json FILE]`.

Runs the checks of `tests/gpu/parts` in order of value until the budget is spent, and writes one
JSON document after each. Exit codes: 0, 1 where a check failed, 2 for a usage error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.checks import unmet
from tests.gpu.report import Report, line, summary
from tests.gpu.supervise import Setting, checks_of, run_part

ORDER = (
    "facts kernels attention launched_runs staged_ranks memory stream_sanitizer host_time "
    "step_time failure_words benchmarks"
)
PARTS = tuple(f"tests.gpu.parts.{name}" for name in ORDER.split())
"""In order of value: what a budget cuts off is worth least."""
SEVERAL_GPUS = "tests.gpu.parts.nccl_ranks"
"""Only where there are several; first on GPUs. A dry run's kernels must go first."""
BUDGET = 540.0
LEAST_SHARE = 0.6
"""Share of the assertions that a dry run must evaluate."""


def main(words: Sequence[str] | None = None, parts: Sequence[str] = PARTS) -> int:
    """Run the checks.

    Args:
        words: The command line; default: the process's.
        parts: Modules of checks, in order of value.

    Returns:
        The exit code.
    """
    names = [part.rpartition(".")[2] for part in (*parts, SEVERAL_GPUS)]
    parser = _parser(names)
    options = parser.parse_args(words)
    for name in options.only:
        part, _, check = name.partition(":")
        asked, legal = (
            (check, _check_names(part, parts)) if check and part in names else (part, names)
        )
        if asked not in legal:
            parser.error(f"--only is {name!r}; legal: {', '.join(legal)}")
    if options.budget < 0:
        parser.error(f"--budget is {options.budget:g}; legal: 0 seconds or more")
    options.json = options.json or Path(f"build/gpu-check{'-dry' * options.dry}.json")
    if _holds_gpus(options.json) and not options.resume:
        parser.error(
            f"--json: {options.json} holds a run on GPUs, which would be lost; legal: --resume "
            f"{options.json}, or another file"
        )
    until = time.monotonic() + options.budget
    _prepare()
    setting = Setting(options.dry, options.gpus)
    device = "cpu" if options.dry else _gpu_name(options.gpus)
    if device is None:
        print("no GPU that torch can use; legal: --dry, which runs on CPU tensors", file=sys.stderr)
        return 2
    report = Report(options.json, setting, device, options.budget)
    try:
        for former in options.resume:
            report.resume(former)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: --resume: {error}", file=sys.stderr)
        return 2
    if options.gpus > 1:
        parts = [*parts, SEVERAL_GPUS] if options.dry else [SEVERAL_GPUS, *parts]
    for part in parts:
        wanted = _wanted(part.rpartition(".")[2], options.only)
        if wanted is not None:
            _run(part, report, until, wanted)
    report.write()
    print(summary(report))
    counts = report.counts()
    too_few = options.dry and not counts["not_reached"] and counts["evaluated_share"] < LEAST_SHARE
    return 1 if counts["failed"] or too_few else 0


def _wanted(part: str, only: list[str]) -> list[str] | None:
    """The checks of a part that `--only` names; none: all of them; None: leave the part out."""
    named = [name.partition(":") for name in only]
    if not only or (part, "", "") in named:
        return []
    return [check for name, _, check in named if name == part] or None


def _check_names(part: str, parts: Sequence[str]) -> list[str]:
    module = next(each for each in (*parts, SEVERAL_GPUS) if each.rpartition(".")[2] == part)
    return [check.name for check in checks_of(module)]


def _run(part: str, report: Report, until: float, wanted: list[str]) -> None:
    """Run the checks of a part that have not passed: those `wanted`, or all."""
    known = {check for (name, check), _ in report.results.items() if name == part}
    try:
        names = [check.name for check in checks_of(part) if check.name not in known]
        names = [name for name in names if not wanted or name in wanted]
    except Exception:  # a package is missing here: the other parts may do without
        broken = unmet(part, "import", "failed", traceback.format_exc(limit=-3))
        report.add(broken)
        print(line(broken), flush=True)
        return
    for result in run_part(part, names, report.setting, until):
        report.add(result)
        print(line(result), flush=True)


def _prepare() -> None:
    """Make this process fit to be forked: one thread, and no CUDA driver, which a fork breaks."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    torch.set_num_threads(1)


def _gpu_name(least: int) -> str | None:
    """The GPUs' name, asked of a child; None where there are fewer than `least`."""
    code = (
        f"import torch; assert torch.cuda.device_count() >= {least};"
        "print(torch.cuda.get_device_name(0))"
    )
    asked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    return asked.stdout.strip() or None if asked.returncode == 0 else None


def _holds_gpus(path: Path) -> bool:
    """Whether a file is the document of a run on GPUs."""
    try:
        return json.loads(path.read_text())["dry"] is False
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _parser(parts: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check", description=__doc__)
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds in all")
    former = "go on after the document of a former run; may be repeated"
    parser.add_argument("--resume", type=Path, action="append", default=[], help=former)
    parser.add_argument("--dry", action="store_true", help="on CPU tensors, sizes scaled down")
    parser.add_argument("--gpus", type=int, default=1, choices=range(1, 9), metavar="1..8")
    parser.add_argument("--json", type=Path, help="build/gpu-check.json, dry gpu-check-dry.json")
    named = f"a part, or `part:check`; may be repeated; parts: {', '.join(parts)}"
    parser.add_argument("--only", action="append", default=[], help=named)
    return parser


if __name__ == "__main__":
    sys.exit(main())
