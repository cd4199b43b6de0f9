"""What a shell script says without running it: `commands` reads text into commands with their
words.

Nothing is executed. A word whose value only a run would know says so; where a condition cannot be
decided, both of its outcomes stand side by side.
"""

from __future__ import annotations

from workbench.interop.shell.commands import ShellCommand
from workbench.interop.shell.script import Script, commands
from workbench.interop.shell.values import (
    Branch,
    Either,
    Item,
    Text,
    Unknown,
    Value,
    alternatives,
    shown_value,
    split,
)

__all__ = [
    "Branch",
    "Either",
    "Item",
    "Script",
    "ShellCommand",
    "Text",
    "Unknown",
    "Value",
    "alternatives",
    "commands",
    "shown_value",
    "split",
]
