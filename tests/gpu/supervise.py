"""Runs the checks of a part in a child process, so that a crash or a hang loses one check only."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from tests.gpu.checks import Check, Evidence, Result, unmet
from workbench.runs.launch.parent_death import die_with_parent


@dataclass(frozen=True)
class Setting:
    """Where checks run: on CPU tensors (`dry`), or on this many GPUs."""

    dry: bool
    gpus: int


def checks_of(module: str) -> list[Check]:
    """The checks of a part, by the name of its module."""
    found: list[Check] = importlib.import_module(module).CHECKS
    return found


def run_part(module: str, names: list[str], setting: Setting, until: float) -> Iterator[Result]:
    """Run checks of one part, and yield the outcome of each as soon as it is known.

    A child process runs them in order. One that crashes, or exceeds the deadline of its check, is
    ended with all that it started, and another child goes on with the next check. A part of forked
    ranks (`FORKS`) has a child for each check: a process that has used CUDA must not fork.

    Args:
        module: The part's module.
        names: Which of its checks, in order.
        setting: Where.
        until: `time.monotonic()` at which the budget is spent.
    """
    todo = [check for check in checks_of(module) if check.name in names]
    while todo and time.monotonic() < until:
        child = _Child(module, todo[:1] if _forks(module) else todo, setting)
        try:
            for result in child.results(until):
                todo = todo[1:]
                yield result
        finally:
            child.end()
    yield from (unmet(module, check.name, "not reached", "the budget was spent") for check in todo)


def _forks(module: str) -> bool:
    return bool(getattr(importlib.import_module(module), "FORKS", False))


class _Child:
    """A process that runs checks in order and reports each."""

    def __init__(self, module: str, checks: list[Check], setting: Setting) -> None:
        self.module, self.checks = module, checks
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_run_checks, args=(module, checks, setting, self.folder, theirs)
        )
        self.process.start()
        theirs.close()

    def results(self, until: float) -> Iterator[Result]:
        for check in self.checks:
            begun = time.monotonic()
            result = self._result(min(until, begun + check.seconds))
            if result is not None:
                yield result
                continue
            spent = time.monotonic() - begun
            if time.monotonic() >= until and spent < check.seconds:
                return  # the budget's end, not the check's
            yield unmet(self.module, check.name, "failed", self._why(check), spent)
            return

    def _result(self, deadline: float) -> Result | None:
        """The next outcome; None where there is none by the deadline, or the child is gone."""
        try:
            if self.pipe.poll(max(0.0, deadline - time.monotonic())):
                result: Result = self.pipe.recv()
                return result
        except EOFError:
            self.process.join(5)
        return None

    def _why(self, check: Check) -> str:
        if self.process.is_alive():
            return f"no answer within its deadline of {check.seconds:g} s"
        code = self.process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"the process ended by {how}"

    def end(self) -> None:
        """End the child, its process group, and whatever was started in its folder."""
        if self.process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        for process in psutil.process_iter():
            try:
                if str(self.folder) in " ".join(process.cmdline()):
                    process.kill()
            except psutil.Error:
                continue
        shutil.rmtree(self.folder, ignore_errors=True)


def _run_checks(
    module: str, checks: list[Check], setting: Setting, folder: Path, pipe: Connection
) -> None:
    parent = os.getppid()
    os.setsid()
    die_with_parent(parent)
    for check in checks:
        own = folder / check.name.replace("/", "-").replace(" ", "-")
        own.mkdir(parents=True, exist_ok=True)
        evidence, begun, error = Evidence(setting.dry, setting.gpus, own), time.monotonic(), ""
        try:
            check.run(evidence)
        except Exception:
            error = traceback.format_exc(limit=-6)
        pipe.send(evidence.result(module, check.name, time.monotonic() - begun, error))
    pipe.close()
    os._exit(0)
