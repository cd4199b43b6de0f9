"""The command `doctor`: what is attached, installed and missing, and the command that fixes it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import typer

from workbench.cli.gpu_findings import Finding, driver_problem, gpu_findings
from workbench.cli.options import Json, emit
from workbench.cli.tables import table
from workbench.cli.terminal import Grid
from workbench.machine.attached import attached, host_memory
from workbench.runs.launch.kernel_compilers import compiler as compiler_path
from workbench.runs.store.run_directory import default_root
from workbench.units import GIB

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TRACKERS = ("tensorboard", "wandb", "mlflow")
SOURCE = Path(__file__).parents[3] / "pyproject.toml"
"""What a checkout declares, which an editable install keeps a copy of as it was when it was
installed.
"""


def doctor(json: Json = False) -> None:
    found = examine()
    emit(json, [asdict(finding) for finding in found], lambda: [_table(found)])
    if any(finding.ok is False for finding in found):
        raise typer.Exit(1)


def _table(found: list[Finding]) -> Grid:
    built = table("Doctor", ("what", "", "found", "fix"))
    for finding in found:
        mark = {True: "ok", False: "PROBLEM", None: "optional"}[finding.ok]
        built.add_row(finding.what, mark, finding.found, "" if finding.ok else finding.fix)
    return built


def examine() -> list[Finding]:
    """Everything that a run, a notebook or a test needs of this machine."""
    return [
        _python(),
        *_devices(),
        _memory(),
        *map(_package, needed()),
        _launcher(),
        _runs(),
        *_optional(),
    ]


def needed() -> list[str]:
    """Packages that workbench declares, without its extras; itself where it is neither a checkout
    nor installed.
    """
    return [
        found[0]
        for line in _declared()
        if "extra ==" not in line and (found := re.match(r"[\w.-]+", line))
    ]


def _declared() -> list[str]:
    """Requirements, of the checkout where this is one: after a pull the installed metadata may be
    older than it.
    """
    if SOURCE.is_file():
        project = tomllib.loads(SOURCE.read_text(encoding="utf-8"))["project"]
        if project["name"] == "workbench":
            return list(project["dependencies"])
    try:
        return importlib.metadata.requires("workbench") or []
    except importlib.metadata.PackageNotFoundError:
        return ["workbench"]


def _python() -> Finding:
    found = platform.python_version()
    return Finding(
        "python", sys.version_info >= (3, 11), found, "workbench needs Python 3.11 or later"
    )


def _devices() -> list[Finding]:
    if (problem := driver_problem()) is not None:
        return [problem]
    here = attached()
    what = (
        f"{here.count} x {here.name}"
        if here.device == "cuda"
        else f"{here.name}: up to {here.count} ranks"
    )
    return [Finding("devices", True, what), *gpu_findings(here)]


def _memory() -> Finding:
    return Finding("memory", True, f"{host_memory() / GIB:.1f} GiB")


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", f"pip install {name}")


def _launcher() -> Finding:
    beside = Path(sys.executable).with_name("accelerate")
    found = str(beside) if beside.exists() else shutil.which("accelerate")
    return Finding(
        "accelerate launch",
        bool(found),
        "found" if found else "not on PATH",
        "pip install accelerate",
    )


def _runs() -> Finding:
    root = default_root()
    nearest = next(folder for folder in (root, *root.parents) if folder.exists())
    free = shutil.disk_usage(nearest).free / GIB
    fine = os.access(nearest, os.W_OK)
    return Finding(
        "runs",
        fine,
        f"{root}, {free:.1f} GiB free",
        "set WORKBENCH_RUNS to a folder that you may write",
    )


def _optional() -> list[Finding]:
    browser = next((name for name in BROWSERS if shutil.which(name)), None)
    compiler, triton, torchao = compiler_path(), _package("triton"), _package("torchao")
    found = [
        Finding(
            "C++ compiler (kernels)",
            bool(compiler) or None,
            compiler or "none",
            "apt-get install g++",
        ),
        Finding(
            "triton (kernels)", triton.ok or None, triton.found, "pip install triton; GPUs need it"
        ),
        Finding("torchao (fp8)", torchao.ok or None, torchao.found, "pip install torchao"),
    ]
    found += [
        Finding(
            "browser (tests)", bool(browser) or None, browser or "none", "apt-get install chromium"
        )
    ]
    for name in TRACKERS:
        one = _package(name)
        found.append(one if one.ok else Finding(f"{name} (tracker)", None, one.found, one.fix))
    return found
