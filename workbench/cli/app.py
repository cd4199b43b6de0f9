"""The command `workbench`: its table of commands, each imported when it is called, and exit codes.

Exit codes: 2 usage or an illegal plan, 1 failure, 130 Ctrl-C, 143 SIGTERM. `answer` lets through
what it does not expect, so that tests see it; `main` alone reports it in one sentence.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_install_completion_arguments

from workbench import verbs
from workbench.errors import ChildError, PlanError, RunError
from workbench.safe_io.files import unread
from workbench.termination import cleaned_up_when_ended, exit_code
from workbench.untrusted_text import brief, visible

USAGE, FAILURE = 2, 1
TRACEBACK = "WORKBENCH_TRACEBACK"
"""Environment variable that shows the traceback of an internal error."""
SHOWN = 200
"""Characters of an internal error's own message."""


NEGATIVE = re.compile(r"-\.?([0-9]|(nan|inf)$)", re.IGNORECASE)


class Command(NamedTuple):
    """Where a command is implemented, and what `--help` says of it."""

    module: str
    """Module of `workbench.cli.commands` with a function of the command's name."""
    text: str = ""
    """Help of a command that is no verb; a verb's help is its docstring."""


COMMANDS: dict[str, dict[str, Command]] = {
    "Plan": {
        "models": Command("catalog"),
        "gpus": Command("catalog"),
        "strategies": Command("catalog"),
        "kernels": Command("kernels", "List fused kernels: devices, resources, measured speed."),
        "plan": Command("plans", "Declare a plan, check it, show it, write it to a file."),
        "export": Command("plans"),
        "import": Command("interop"),
        "translate": Command("interop"),
    },
    "Planner": {
        "states": Command("explain"),
        "search": Command("search"),
        "explain": Command("explain"),
        "operators": Command("operators"),
        "calibrate": Command("calibrate"),
        "profile-layers": Command("profile_layers"),
        "validate": Command("validate"),
    },
    "Instruments": {
        "estimate": Command("plans"),
        "rehearse": Command("plans"),
        "verify": Command("plans"),
        "compare": Command("compare"),
    },
    "Runs": {
        "tokenize": Command("weights"),
        "run": Command("runs"),
        "attach": Command(
            "runs",
            "Follow a run to its end, from any shell.\n\nCtrl-C detaches, and the run goes on.",
        ),
        "stop": Command("runs", "Stop a run after its step, and wait until it is over."),
        "runs": Command("runs"),
        "weights": Command("weights"),
    },
    "Models": {"generate": Command("weights"), "perplexity": Command("weights")},
    "This machine": {
        "doctor": Command("doctor", "Check what is attached, installed and missing."),
        "lab": Command(
            "lab", "Open JupyterLab on a notebook.\n\nWith --json only print the command that does."
        ),
    },
}
"""Family -> command -> where it is; `--help` lists them in this order."""
_BY_NAME = {name: command for family in COMMANDS.values() for name, command in family.items()}
_FUNCTIONS = {"import": "import_config", "profile-layers": "profile_layers"}
"""Command -> its function and verb, where the name is none in Python."""


def help_text(name: str) -> str:
    """What `workbench NAME --help` says first: the verb's docstring up to its arguments."""
    if text := _BY_NAME[name].text:
        return text
    verb = getattr(verbs, _FUNCTIONS.get(name, name))
    return (inspect.getdoc(verb) or "").partition("\n\nArgs:")[0]


class NegativeNumbers(TyperCommand):
    """A command that takes what begins as a negative number for an argument, as argparse does: no
    option is named so, and a verb says what is legal.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line."""
        ctx.ignore_unknown_options = any(map(NEGATIVE.match, args))
        return super().parse_args(ctx, args)


class LazyGroup(TyperGroup):
    """The commands of the table, listed by family; one is imported when it is called.

    `--help` and errors of usage must not wait for pydantic and numpy.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Names, in the order of the table."""
        return list(_BY_NAME)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Commands that begin so, with their help; none is imported for it."""
        self.only_described = True
        return super().shell_complete(ctx, incomplete)

    only_described = False
    """True where commands are asked for to be listed, not to be called."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, imported; None where there is none."""
        if cmd_name not in _BY_NAME:
            return None
        if self.only_described:
            return TyperCommand(cmd_name, help=help_text(cmd_name))
        module = import_module(f"workbench.cli.commands.{_BY_NAME[cmd_name].module}")
        single = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
        )
        function = getattr(module, _FUNCTIONS.get(cmd_name, cmd_name))
        single.command(cmd_name, cls=NegativeNumbers, help=help_text(cmd_name))(function)
        return typer.main.get_command(single)

    def invoke(self, ctx: Any) -> Any:
        """Run the command of a context. Raises `Abort` where it is interrupted, and why."""
        try:
            with cleaned_up_when_ended():
                return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise typer.Abort from interrupt  # typer itself would end it as Ctrl-C, without a word

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each family: names and the first line of their help."""
        widest = max(map(len, _BY_NAME))
        for family, commands in COMMANDS.items():
            with formatter.section(family):
                formatter.write_dl([(name.ljust(widest), _first_line(name)) for name in commands])


def _first_line(name: str) -> str:
    return help_text(name).partition("\n")[0].rstrip(".")


def _completion_options() -> list[Any]:
    """`--install-completion` and `--show-completion`, each described in one line."""
    install, show = options = get_install_completion_arguments()
    for one, text in ((install, "Complete words in this shell."), (show, "Print what that adds.")):
        vars(one)["help"] = text
    return list(options)


app = LazyGroup(
    name="workbench",
    # Names alone, for "Did you mean"; `get_command` finds what they stand for.
    commands=dict.fromkeys(_BY_NAME),  # type: ignore[arg-type]
    help="Plan, estimate, rehearse, run and compare distributed training: one plan, three "
    "instruments.",
    params=_completion_options(),
    no_args_is_help=True,
    rich_markup_mode=None,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `workbench` command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_streams()
    try:
        code = answer(words)
    except Exception as error:
        code = _internal_error(words, error)
    try:
        sys.stdout.flush()
    except OSError:
        code = code or FAILURE
        # What could not be written must not be tried again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _open_streams() -> None:
    """Open /dev/null for a stream that the caller closed (`>&-`).

    Its number would else go to the next file opened, and output would be written into that.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: SIM115 - for as long as the process


def answer(words: list[str]) -> int:
    """Run one command line.

    Errors are printed on stderr, and with `--json` as one document on stdout too.

    Args:
        words: The arguments, without `workbench`.

    Returns:
        The exit code.
    """
    try:
        code = app.main(args=words, prog_name="workbench", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except PlanError as error:
        return _print_error(words, str(error), USAGE, [vars(one) for one in error.problems])
    except UnicodeDecodeError as error:
        return _print_error(words, f"a file cannot be read: {unread(error)}", USAGE)
    except ValueError as error:
        return _print_error(words, brief(str(error)), USAGE)
    except OSError as error:
        parts = filter(None, (error.filename, unread(error)))
        return _print_error(words, brief(": ".join(map(str, parts))), FAILURE)
    except (ChildError, RunError) as error:
        return _print_error(words, str(error), FAILURE)
    except (KeyboardInterrupt, typer.Abort) as interrupt:
        return _print_error(words, "interrupted", exit_code(interrupt))
    except Exception as error:
        if not hasattr(error, "show"):
            raise
        error.show()  # a usage error of the command line itself
        code = int(getattr(error, "exit_code", USAGE))
        return _error_as_json(words, getattr(error, "format_message", error.__str__)(), code)


def _internal_error(words: list[str], error: Exception) -> int:
    """Report an error that nobody foresaw in one sentence; its traceback goes to a file that can be
    sent.
    """
    trace = "".join(traceback.format_exception(error))
    where = f"{TRACEBACK}=1 shows the traceback"
    if os.environ.get(TRACEBACK):
        where = "the traceback is above"
        sys.stderr.write(visible(trace))
    else:
        with contextlib.suppress(OSError):
            handle, path = tempfile.mkstemp(prefix="workbench-traceback-", suffix=".txt")
            with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
                file.write(trace)
            where = f"the traceback is in {path}, {where} here"
    first = (str(error).strip().splitlines() or [""])[0][:SHOWN]
    message = f"internal error: {type(error).__name__}: {first} (please report it; {where})"
    return _print_error(words, message, FAILURE)


def _print_error(
    words: list[str], message: str, code: int, problems: list[dict[str, str]] | None = None
) -> int:
    from workbench.cli.terminal import print_message

    print_message(f"error: {message}", "red")
    return _error_as_json(words, message, code, problems)


def _error_as_json(
    words: list[str], message: str, code: int, problems: list[dict[str, str]] | None = None
) -> int:
    if "--json" in words:
        with contextlib.suppress(OSError):  # the error may be that stdout takes no more
            document = {"error": message, "problems": problems or [], "exit_code": code}
            sys.stdout.write(json.dumps(document) + "\n")
            sys.stdout.flush()
    return code
