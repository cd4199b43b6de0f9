"""The arguments that a script or command line gives to a trainer's program, with those of the files
that it names: the program's own YAML, and accelerate's for its launch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import refuse
from workbench.interop.foreign_keys import UndecidedValue
from workbench.interop.megatron.flags import Occurrence, occurrences, resolve_flag
from workbench.interop.shell import Item, ShellCommand, Value, commands, shown_value
from workbench.interop.trainer.files_beside import section
from workbench.interop.translation import ImportOptions, KeyNote

_PROCESSES = ("num_processes", "nproc_per_node", "num_gpus")
_NODES = ("nnodes", "num_machines", "num_nodes")
_TALK = ("echo", "printf", "cat")
"""Commands that only show what stands behind them."""
_NAMED = re.compile(r"(?<![a-z])(sft|dpo)(?![a-z])")
"""A trainer of TRL in the name of its command or script."""
_RECIPE = re.compile(r"\.(?:ya?ml|json)$")


@dataclass
class CommandLine:
    """Arguments that a script gives to its program and to the launcher."""

    data: dict[str, Any] = field(default_factory=dict)
    """Argument -> value, the command line's above the YAML's."""
    launch: dict[str, Any] | None = None
    """accelerate's YAML, where the command names one."""
    launch_name: str = ""
    trainer: str = ""
    """SFT or DPO, where the command or the script is called so."""
    gpus: int | None = None
    ignored: list[KeyNote] = field(default_factory=list)


def is_command_line(text: str) -> bool:
    """True for words of a shell that are no mapping."""
    return bool(re.search(r"(?m)(?:^|\s)--[A-Za-z]\w*", text)) and not re.search(
        r"(?m)^[\"']?[A-Za-z_]\w*[\"']?\s*:\s", text
    )


def read(text: str, known: frozenset[str], given: ImportOptions) -> CommandLine:
    """The arguments of the one command that trains. Raises `PlanError`."""
    script = commands(text)
    trains = [c for c in script.commands if c.name not in _TALK and _trains(c, known)]
    if len(trains) != 1:
        lines = ", ".join(str(command.line) for command in trains) or "none"
        raise refuse(
            "file",
            f"holds {len(trains)} commands with a trainer's arguments (lines {lines}); legal: one",
        )
    found, (front, program, back) = CommandLine(), _parts(trains[0])
    loose: list[Value] = []
    flags: dict[str, list[Occurrence]] = {}
    for each in (*occurrences(front, []), *occurrences(back, loose)):
        flags.setdefault(each.flag.replace("-", "_"), []).append(each)
    for name, several in flags.items():
        said = resolve_flag(name, several)
        value = said if isinstance(said, UndecidedValue) else said.value
        _place(found, name, value, known)
    words = [shown_value(word) for word in loose]
    named = _NAMED.search(program.rpartition("/")[2])
    found.trainer = named[1].upper() if named else ""
    _files(found, words, given)
    found.ignored += [
        KeyNote(f"line {command.line}", command.name[:80], "another command")
        for command in script.commands
        if command is not trains[0]
    ]
    return found


def _parts(command: ShellCommand) -> tuple[tuple[Item, ...], str, tuple[Item, ...]]:
    """(the launcher's words, the script or the trainer of `trl`, the words behind it)."""
    words = command.words
    shown = [_shown(word) for word in words]
    at = next((k for k, text in enumerate(shown) if text.endswith(".py")), None)
    if at is None and command.name == "trl":
        at = next((k for k, text in enumerate(shown) if text in ("sft", "dpo")), None)
    return ((), "", words) if at is None else (words[:at], shown[at], words[at + 1 :])


def _shown(word: Item) -> str:
    return shown_value(word) if isinstance(word, tuple) else ""


def _trains(command: ShellCommand, known: frozenset[str]) -> bool:
    """True where a command has a trainer's arguments, or gives its script a file of them."""
    _, program, back = _parts(command)
    flags = {each.flag.replace("-", "_") for each in occurrences(command.words, [])}
    return bool(flags & known) or bool(program and any(_RECIPE.search(_shown(w)) for w in back))


def _place(found: CommandLine, name: str, value: Any, known: frozenset[str]) -> None:
    """Put one argument where it belongs: to the program, or to the launcher."""
    if name.startswith("no_") and name[3:] in known:
        found.data[name[3:]] = False
    elif name == "config_file":
        found.launch_name = str(value)
    elif name == "config":
        found.data["config"] = value
    elif name in known:
        found.data[name] = value
    elif name in _PROCESSES and isinstance(value, int):
        found.gpus = value * (found.gpus or 1)
    elif name in _NODES and isinstance(value, int):
        found.gpus = (found.gpus or 1) * value
    else:
        found.ignored.append(KeyNote(f"--{name}", str(value), "the launcher's word, or unknown"))


def _files(found: CommandLine, loose: list[str], given: ImportOptions) -> None:
    """Read the YAML of the program's arguments and accelerate's, where the command names them."""
    recipe = found.data.pop("config", None) or next(filter(_RECIPE.search, loose), None)
    if recipe is not None:
        base, _ = section(recipe, "config", given, {})
        found.data = {**base, **found.data}
    if found.launch_name:
        stand_in: Mapping[str, Any] = {"strategy.data.zero": 3}
        found.launch, _ = section(found.launch_name, "--config_file", given, stand_in)
        alone = found.launch.get("distributed_type") == "NO"
        count = 1 if alone else found.launch.get("num_processes")
        if found.gpus is None and isinstance(count, int):
            found.gpus = count
