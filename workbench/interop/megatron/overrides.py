"""What is given beside Megatron-LM's arguments: `--set` decides a script's variable, an argument,
or a plan's field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.errors import refuse
from workbench.interop.foreign_keys import ForeignKeys, UndecidedValue
from workbench.interop.foreign_text import Parsed
from workbench.interop.megatron.megatron_keys import FIELDS, KNOWN, LAUNCHER, LEARNING
from workbench.interop.megatron.scripts import Arguments
from workbench.interop.translation import ImportOptions, KeyNote


def variables(given: ImportOptions, source: str | Parsed) -> dict[str, str]:
    """What is set of a script's own variables: names in capitals, or the number of an argument.

    Raises `PlanError` for one that the source does not read.
    """
    named = {
        key: str(value)
        for key, value in given.sets.items()
        if re.fullmatch(r"[A-Z_][A-Z0-9_]*|\d{1,2}", key)
    }
    text = source if isinstance(source, str) else repr(source)
    for name in named:
        if not re.search(rf"\$\{{?{name}\b" if name.isdigit() else rf"\b{name}\b", text):
            raise refuse("--set", f"{name} is no variable that the file reads")
    return named


def decided(
    found: Arguments, given: ImportOptions, named: Mapping[str, str]
) -> tuple[ImportOptions, ForeignKeys]:
    """What is given for the plan's fields alone, and the keys with what is set of them in place."""
    sets = {key: value for key, value in given.sets.items() if key not in named}
    for flag in [key for key in sets if key in KNOWN or key in found.flags]:
        _decide(found, flag, sets.pop(flag), add=True)
    for flag, field in FIELDS.items():
        if field in sets:
            _decide(found, flag, sets[field])
    for flag in [flag for flag in LAUNCHER[:2] if flag in found.flags]:
        if "cluster.gpus" in sets or (given.gpus is not None and flag in found.defaults):
            found.ignored.append(
                KeyNote(f"--{flag}", str(found.flags.pop(flag)), f"{given.gpus} GPUs are given")
            )
            found.defaults.pop(flag, None)
    return replace(given, sets=sets), _keys(found)


def _decide(found: Arguments, flag: str, value: Any, add: bool = False) -> None:
    said = found.flags.get(flag)
    if said is not None and said != value:
        shown_value = str(said) if isinstance(said, UndecidedValue) else said
        found.ignored.append(KeyNote(f"--{flag}", shown_value, f"{value} is set instead"))
    if said is not None or add:
        found.flags[flag] = value
        found.defaults.pop(flag, None)
    if value is False:
        found.flags.pop(flag, None)


def _keys(found: Arguments) -> ForeignKeys:
    still_open = {
        flag: value
        for flag, value in found.flags.items()
        if flag in LEARNING and isinstance(value, UndecidedValue)
    }
    keys = ForeignKeys({k: v for k, v in found.flags.items() if k not in still_open}, "--{}")
    for flag, value in still_open.items():
        why = f"{value.why}; taken as not given, as no memory and no time of a step depends on it"
        keys.assume(f"--{flag}", str(value), why)
    keys.ignored += found.ignored
    keys.untranslated += found.left
    for flag, (variable, value) in found.defaults.items():
        kind = "the script's argument" if variable.isdigit() else "the environment variable"
        keys.assume(f"--{flag}", value, f"default of {kind} ${variable}")
    for variable, text in found.decided_by.items():
        keys.assume(f"${variable}", text, "taken as not set; a condition of the script reads it")
    return keys
