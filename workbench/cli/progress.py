"""Progress of a command on stderr: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from workbench.cli.tables import cause_text
from workbench.cli.terminal import console
from workbench.errors import RunError
from workbench.runs.run import Run
from workbench.runs.store.run_state import State
from workbench.units import loss_text
from workbench.untrusted_text import visible

LINE_SECONDS = 5.0
"""At most one line in this time, and one for the last step, where no terminal can redraw one."""
STOP_SECONDS = 60.0


class Status:
    """Work of unknown length: a spinner in a terminal, else lines; call it with what it is at."""

    def __init__(self, words: str) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
        )
        self.bar = Progress(
            *columns, console=console(stderr=True), transient=True, disable=not sys.stderr.isatty()
        )
        self.task = self.bar.add_task(visible(words), total=None)

    def __enter__(self) -> Status:
        self.bar.start()
        return self

    def __call__(self, words: str) -> None:
        words = visible(words)
        self.bar.update(self.task, description=words)
        if self.bar.disable:
            print(words, file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


class CountBar:
    """So many done of a number that is known: a bar in a terminal, lines elsewhere.

    Args:
        words: The work.
        unit: What is counted.
    """

    def __init__(self, words: str, unit: str) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit, markup=False),
            TimeElapsedColumn(),
        )
        self.bar = Progress(
            *columns, console=console(stderr=True), transient=True, disable=not sys.stderr.isatty()
        )
        self.words, self.unit, self.last_line = words, unit, 0.0
        self.task = self.bar.add_task(words, total=None)

    def __enter__(self) -> CountBar:
        self.bar.start()
        return self

    def __call__(self, done: int, of: int) -> None:
        self.bar.update(self.task, completed=done, total=of)
        late = time.monotonic() - self.last_line > LINE_SECONDS
        if self.bar.disable and (late or done == of):
            self.last_line = time.monotonic()
            print(f"{self.words}, {done} of {of} {self.unit}", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


class SecondsBar:
    """Seconds measured of those asked for: a bar in a terminal, lines elsewhere."""

    def __init__(self, seconds: float) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        self.bar = Progress(
            *columns, console=console(stderr=True), transient=True, disable=not sys.stderr.isatty()
        )
        self.task = self.bar.add_task("starting", total=seconds)
        self.last_line = 0.0

    def __enter__(self) -> SecondsBar:
        self.bar.start()
        return self

    def __call__(self, done: float, of: float, words: str) -> None:
        self.bar.update(self.task, completed=done, total=of, description=words)
        if self.bar.disable and time.monotonic() - self.last_line > LINE_SECONDS:
            self.last_line = time.monotonic()
            places = 0 if of >= 5 else 1
            print(f"{words}, {done:.{places}f} of {of:.{places}f} s", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


def follow(run: Run, words: str = "") -> State:
    """Wait for the end of `run`, and show its steps and loss; `words` name the run."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    steps, quiet, words = run.state.steps, not sys.stderr.isatty(), visible(words)
    last_line = 0.0
    with Progress(*columns, console=console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task(f"{words} starting".strip(), total=steps)

        def on_records(records: list[dict[str, Any]]) -> None:
            nonlocal last_line
            building = [r for r in records if r["kind"] == "phase" and r["phase"] == "building"]
            if building and (detail := building[-1].get("detail")):
                text = f"{words} {visible(detail)}".strip()
                bar.update(task, description=text)
                if quiet and time.monotonic() - last_line > LINE_SECONDS:
                    last_line = time.monotonic()
                    print(text, file=sys.stderr, flush=True)
            done = [r for r in records if r["kind"] == "step"]
            if not done:
                return
            last = done[-1]
            text = f"{words} loss {loss_text(last['loss'])}".strip()
            bar.update(task, completed=last["step"] + 1, description=text)
            if quiet and (time.monotonic() - last_line > LINE_SECONDS or last["step"] + 1 == steps):
                last_line = time.monotonic()
                print(f"{text}, step {last['step'] + 1} of {steps}", file=sys.stderr, flush=True)

        warned = ""

        def on_state(state: State) -> None:
            nonlocal warned
            if state.warning and state.warning != warned:
                bar.console.print(
                    visible(f"warning: {state.warning}"), markup=False, highlight=False
                )
            warned = state.warning

        return run.wait(progress=on_records, seen=on_state)


def run_to_end(run: Run, words: str) -> Run:
    """`run` when it is over; Ctrl-C stops it. Raises `RunError` where it failed."""
    try:
        state = follow(run, words)
    except KeyboardInterrupt:
        run.stop()
        run.wait(STOP_SECONDS)
        raise
    if state.phase != "finished":
        cause = state.cause
        why = f": {cause_text(cause)}. {cause.advice}\n{cause.log_tail}" if cause else ""
        raise RunError(f"run {run.id} {state.phase}{why}".rstrip())
    return run
