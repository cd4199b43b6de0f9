"""The shell's side of the verbs: `workbench COMMAND`.

Exit codes: 2 usage or an illegal plan, 1 failure, 130 Ctrl-C. `answer` lets through what it does
not expect, so that tests see it; `main` alone says it in one sentence.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence

import typer

from workbench.cli.command_groups import Grouped
from workbench.cli.commands import (
    calibrate,
    catalog,
    compare,
    explain,
    interop,
    kernels,
    lab,
    operators,
    plans,
    runs,
    search,
    validate,
    weights,
)
from workbench.cli.progress import RunError
from workbench.cli.terminal import tell
from workbench.errors import PlanError
from workbench.runs.launch.child_process import ChildError
from workbench.safe_io.files import unread
from workbench.untrusted_text import brief, visible

USAGE, FAILURE, INTERRUPTED = 2, 1, 130
TRACEBACK = "WORKBENCH_TRACEBACK"
"""Environment variable that shows the traceback of an internal error."""
SHOWN = 200
"""Characters of an internal error's own message."""

app = typer.Typer(
    name="workbench",
    cls=Grouped,
    help="Plan, estimate, rehearse, run and compare distributed training: one plan, three "
    "instruments.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _panel, _verbs in {
    "Plan": (
        catalog.models,
        catalog.gpus,
        catalog.strategies,
        kernels.kernels,
        plans.plan,
        plans.export,
        interop.import_config,
        interop.translate,
    ),
    "Planner": (
        search.search,
        explain.explain,
        operators.operators,
        calibrate.calibrate,
        validate.validate,
    ),
    "Instruments": (plans.estimate, plans.rehearse, plans.verify, compare.compare),
    "Runs": (runs.run, runs.attach, runs.stop, runs.runs, weights.weights),
    "This machine": (runs.doctor, lab.lab),
}.items():
    for _verb in _verbs:
        app.command(_verb.__name__.removesuffix("_config"), rich_help_panel=_panel)(_verb)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `workbench` command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_streams()
    try:
        code = answer(words)
    except Exception as error:
        code = _internal(words, error)
    try:
        sys.stdout.flush()
    except OSError:
        code = code or FAILURE
        # What could not be written must not be tried again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _open_streams() -> None:
    """Where the caller closed a stream (`>&-`), what is said on it goes nowhere, not into the next
    file opened.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: SIM115 - for as long as the process


def answer(words: list[str]) -> int:
    """Run one command line; its exit code. Errors are said on stderr, and as JSON on stdout too
    where that is asked.
    """
    try:
        code = typer.main.get_command(app).main(
            args=words, prog_name="workbench", standalone_mode=False
        )
        return code if isinstance(code, int) else 0
    except PlanError as error:
        return _said(words, str(error), USAGE, [vars(problem) for problem in error.problems])
    except UnicodeDecodeError as error:
        return _said(words, f"a file cannot be read: {unread(error)}", USAGE)
    except ValueError as error:
        return _said(words, brief(str(error)), USAGE)
    except OSError as error:
        return _said(
            words,
            brief(": ".join(map(str, filter(None, (error.filename, unread(error)))))),
            FAILURE,
        )
    except (ChildError, RunError) as error:
        return _said(words, str(error), FAILURE)
    except (KeyboardInterrupt, typer.Abort):
        return _said(words, "interrupted", INTERRUPTED)
    except Exception as error:
        if not hasattr(error, "show"):
            raise
        error.show()  # a usage error of the command line itself
        code = int(getattr(error, "exit_code", USAGE))
        return _to_machines(words, getattr(error, "format_message", error.__str__)(), code)


def _internal(words: list[str], error: Exception) -> int:
    """The last resort: an error that nobody foresaw, in one sentence; its traceback goes where it
    can be sent from.
    """
    told = "".join(traceback.format_exception(error))
    where = f"{TRACEBACK}=1 shows the traceback"
    if os.environ.get(TRACEBACK):
        where = "the traceback is above"
        sys.stderr.write(visible(told))
    else:
        with contextlib.suppress(OSError):
            handle, path = tempfile.mkstemp(prefix="workbench-traceback-", suffix=".txt")
            with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
                file.write(told)
            where = f"the traceback is in {path}, {where} here"
    first = (str(error).strip().splitlines() or [""])[0][:SHOWN]
    return _said(
        words,
        f"internal error: {type(error).__name__}: {first} (please report it; {where})",
        FAILURE,
    )


def _said(
    words: list[str], message: str, code: int, problems: list[dict[str, str]] | None = None
) -> int:
    tell(f"error: {message}", "red")
    return _to_machines(words, message, code, problems)


def _to_machines(
    words: list[str], message: str, code: int, problems: list[dict[str, str]] | None = None
) -> int:
    if "--json" in words:
        with contextlib.suppress(OSError):  # the error may be that stdout takes no more
            sys.stdout.write(
                json.dumps({"error": message, "problems": problems or [], "exit_code": code}) + "\n"
            )
            sys.stdout.flush()
    return code
