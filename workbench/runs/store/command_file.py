"""`command.json`: all that a supervisor needs to know of its run, so that it can stay small and
need no plan.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import orjson


@dataclass(frozen=True)
class RunCommand:
    """What is started, where, and how patiently it is watched."""

    argv: list[str]
    env: dict[str, str]
    """Variables set on top of the inherited environment."""
    unset: list[str]
    """Variables of the inherited environment that are taken away."""
    cwd: str
    world_size: int
    steps: int
    hello_seconds: float
    """Longest time without work until each rank's first record; ten times as long in all."""
    progress_seconds: float
    """Longest silence of a rank that is not working."""


def write_command(folder: Path, command: RunCommand) -> None:
    """Keep `command` in the run directory `folder`."""
    (folder / "command.json").write_bytes(orjson.dumps(asdict(command), option=orjson.OPT_INDENT_2))


def read_command(folder: Path) -> RunCommand:
    """The command of the run in `folder`."""
    return RunCommand(**orjson.loads((folder / "command.json").read_bytes()))
