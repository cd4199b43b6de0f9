"""A shell script that starts Megatron-LM: which command trains, and what its arguments are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.interop.foreign_keys import UndecidedValue
from workbench.interop.megatron.flags import Occurrence, occurrences, resolve_flag
from workbench.interop.megatron.megatron_keys import DISTINCT, KNOWN, LAUNCHER
from workbench.interop.shell import (
    Branch,
    Item,
    Script,
    ShellCommand,
    Value,
    commands,
    shown_value,
    split,
)
from workbench.interop.shell.values import line_of
from workbench.interop.translation import KeyNote

_LAUNCHED = {
    "num-gpus": "nproc-per-node",
    "num-nodes": "nnodes",
    "nodes": "nnodes",
    **{w: w for w in LAUNCHER[:2]},
}
"""A launcher's argument -> torchrun's name for it."""
_LAUNCHERS = re.compile(
    r"(?:^|/)(?:torchrun|deepspeed|python[\d.]*|accelerate|srun|mpirun|torch\.distributed\.\w+)$"
)
_LAUNCHING_MODULES = ("torch.distributed", "accelerate", "deepspeed")
_TRAINS = re.compile(r"pretrain|train|finetune", re.IGNORECASE)
_TALK = frozenset(
    ("echo", "printf", "cat", "tee", "sed", "awk", "grep", "git", "cp", "ls", "rm", "mkdir")
)
"""Commands that only show or move what stands behind them."""
_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
}
"""An #SBATCH option -> the variables that Slurm sets by it."""


@dataclass
class Arguments:
    """What a script gives to Megatron-LM."""

    flags: dict[str, Any] = field(default_factory=dict)
    """Flag without dashes -> a number, text, a list, True where no value stands, or `Open`."""
    defaults: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """Flag -> (environment variable whose default its value is, the value)."""
    ignored: list[KeyNote] = field(default_factory=list)
    left: list[KeyNote] = field(default_factory=list)
    """Words to Megatron-LM that are not known, and so not read."""
    decided_by: dict[str, str] = field(default_factory=dict)
    """Environment variable -> its default, by which a condition was decided."""


def read(text: str, given: Mapping[str, str] | None = None) -> Arguments:
    """The arguments of the training command in a script's text; `given` are variables decided from
    outside.

    Raises `PlanError` for text that is no script.
    """
    script = commands(text, {**_slurm(text), **(given or {})})
    found = Arguments(decided_by=script.decided_by)
    trains = _training(script.commands)
    loose: list[Value] = []
    front, back = _parts(trains, script)
    ahead, behind = occurrences(front, loose), occurrences(back, loose)
    lines = {line for flag in (*ahead, *behind) for line in (flag.line, *map(line_of, flag.values))}
    _take(found, ahead, behind)
    found.ignored += _ignored(script, trains, lines)
    found.left += [_left(word) for word in loose if not _is_path(shown_value(word))]
    return found


def _slurm(text: str) -> dict[str, str]:
    """Variables that Slurm sets by the file's own #SBATCH lines."""
    return {name: value for names, value in _options(text) for name in names}


def _options(text: str) -> list[tuple[tuple[str, ...], str]]:
    """(Variables that Slurm sets, their value) for each option of the #SBATCH lines."""
    found: list[tuple[tuple[str, ...], str]] = []
    for line in re.findall(r"(?m)^#SBATCH\s(.*)$", text):
        for key, value in re.findall(r"(?:^|\s)--?([\w-]+)[=\s]+(\d{1,7})(?=\s|$)", line):
            found.append((_SLURM.get({"N": "nodes"}.get(key, key), ()), value))
    return found


def _take(found: Arguments, ahead: Sequence[Occurrence], behind: Sequence[Occurrence]) -> None:
    groups: dict[str, list[Occurrence]] = {}
    for flag in ahead:
        if flag.flag in _LAUNCHED:
            groups.setdefault(_LAUNCHED[flag.flag], []).append(flag)
        else:
            text = " ".join(map(shown_value, flag.values))
            found.ignored.append(
                KeyNote(f"--{flag.flag}", text, f"the launcher's word (line {flag.line})")
            )
    for flag in behind:
        groups.setdefault(flag.flag, []).append(flag)
    for name, flags in groups.items():
        value = resolve_flag(name, flags)
        found.flags[name] = value if isinstance(value, UndecidedValue) else value.value
        if isinstance(value, UndecidedValue):
            continue
        if value.default:
            found.defaults[name] = (value.default, value.value)
        if len(flags) > 1 and not any(flag.when for flag in flags):
            lines = " and ".join(str(flag.line) for flag in flags if flag.line)
            found.ignored.append(
                KeyNote(
                    f"--{name}", value.value, f"written twice with the same value (lines {lines})"
                )
            )


def _training(found: Sequence[ShellCommand]) -> list[ShellCommand]:
    """The commands that train: those with Megatron's arguments, and of them those whose script is
    named so.
    """
    able = [command for command in found if _score(command)]
    named = [command for command in able if _TRAINS.search(_script_of(command))]
    bare = [command for command in found if command.name.startswith("--")]
    return named or able or bare


def _score(command: ShellCommand) -> bool:
    if (
        command.name.startswith("--")
        or command.name in _TALK
        or not (_script_at(command) or _LAUNCHERS.search(command.name))
    ):
        return False
    words = {flag.flag for flag in occurrences(command.words, [])}
    return bool(words & DISTINCT) or len((words & KNOWN) - set(LAUNCHER)) >= 3


def _script_at(command: ShellCommand) -> int | None:
    """Where in a command's words the script stands: x.py, or the module behind -m."""
    texts = [shown_value(word) if isinstance(word, tuple) else "" for word in command.words]
    for k, text in enumerate(texts):
        module = k > 1 and texts[k - 1] == "-m" and not text.startswith(_LAUNCHING_MODULES)
        if text.endswith(".py") or module:
            return k
    return None


def _script_of(command: ShellCommand) -> str:
    at = _script_at(command)
    word = command.words[at] if at is not None else ()
    return shown_value(word).rpartition("/")[2] if isinstance(word, tuple) else ""


def _parts(trains: Sequence[ShellCommand], script: Script) -> tuple[list[Item], list[Item]]:
    """(words in front of the script, words behind it); several commands stand side by side."""
    if not trains:
        return [], _sourced(script)
    if trains[0].name.startswith("--"):
        return [], [word for command in trains for word in command.words]
    parts = [_cut(command) for command in trains]
    if len(parts) == 1:
        return list(parts[0][0]), list(parts[0][1])
    why = (
        "which command is meant (lines " + ", ".join(str(command.line) for command in trains) + ")"
    )
    return [Branch(tuple(p[0] for p in parts), why)], [Branch(tuple(p[1] for p in parts), why)]


def _cut(command: ShellCommand) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    at = _script_at(command)
    if at is not None:
        return command.words[:at], command.words[at + 1 :]
    front: list[Item] = []
    back: list[Item] = []
    side = front
    for word in command.words:
        text = shown_value(word) if isinstance(word, tuple) else ""
        name = text.lstrip("-").partition("=")[0].replace("_", "-")
        if text.startswith("--"):
            side = front if name in LAUNCHER or name in _LAUNCHED else back
        side.append(word)
    return tuple(front), tuple(back)


def _sourced(script: Script) -> list[Item]:
    """The words of all variables that hold arguments, where no command trains: a file that others
    source.
    """
    found = [
        word
        for value in script.variables.values()
        for word in split(value)
        if len(value) and re.search(r"(?:^|\s)--[A-Za-z]", " " + shown_value(value))
    ]
    return found


def _left(word: Value) -> KeyNote:
    return KeyNote(
        shown_value(word)[:80],
        None,
        f"no argument that the file gives (line {line_of(word)})"
        if line_of(word)
        else "no argument that the file gives",
    )


def _is_path(text: str) -> bool:
    return bool(_LAUNCHERS.search(text)) or text in (
        "-m",
        "-u",
        "uv",
        "run",
        "exec",
        "nohup",
        "time",
    )


def _ignored(script: Script, trains: Sequence[ShellCommand], lines: set[int]) -> list[KeyNote]:
    found = [KeyNote(f"line {line}", text, why) for line, text, why in script.unread]
    for command in script.commands:
        if not any(command is chosen for chosen in trains):
            found.append(_other(command))
    flagged = [(line, text) for line, text in script.comments if re.search(r"\s--[A-Za-z]", text)]
    found += [
        KeyNote(f"line {line}", " ".join(text.split())[:80], _comment(text))
        for line, text in flagged
    ]
    for name, value in script.variables.items():
        unused = [n for word in split(value) for n in _flag_lines(word)]
        if unused and not set(unused) & lines:
            found.append(
                KeyNote(
                    f"${name}",
                    shown_value(value).strip()[:80],
                    f"no training command uses it (line {unused[0]})",
                )
            )
    return found


def _comment(text: str) -> str:
    """Why a comment is no argument; to Slurm one with #SBATCH is an option."""
    if not text.startswith("#SBATCH"):
        return "a comment"
    names = [name for several, _ in _options(text) for name in several]
    return (
        f"an option of Slurm, which sets {', '.join(names)} by it"
        if names
        else "an option of Slurm"
    )


def _flag_lines(item: Item) -> list[int]:
    if isinstance(item, Branch):
        return [line for choice in item.choices for word in choice for line in _flag_lines(word)]
    return [line_of(item)] if re.match(r"--[A-Za-z]", shown_value(item)) else []


def _other(command: ShellCommand) -> KeyNote:
    text = " ".join(
        shown_value(word) if isinstance(word, tuple) else "..." for word in command.words
    )[:80]
    if command.name.startswith("--"):
        return KeyNote(
            f"line {command.line}",
            text,
            "a command of its own to the shell: the line before does not go on",
        )
    return KeyNote(f"line {command.line}", text, "another command")
