"""Megatron-LM's test recipes (`model_config.yaml`): a mapping `MODEL_ARGS` of `--argument: value`,
and more beside it.

Values become words as in tests/functional_tests/shell_test_utils/_run_training.sh of
NVIDIA/Megatron-LM: true is the argument alone, an empty text leaves it out, brackets hold several
words, parentheses one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from workbench.errors import refuse
from workbench.interop.foreign_keys import UndecidedValue
from workbench.interop.megatron.flags import Occurrence, resolve_flag
from workbench.interop.megatron.scripts import Arguments
from workbench.interop.shell import Text, Unknown, Value
from workbench.interop.translation import KeyNote
from workbench.untrusted_text import shown

ARGUMENTS = "MODEL_ARGS"
_WHYS = {
    "ENV_VARS": "environment variables of the run",
    "TEST_TYPE": "what the test does",
    "MODE": "what the test does",
    "METRICS": "what the test compares",
    "LAUNCHER": "how the test is launched",
    "BEFORE_SCRIPT": "another command",
    "AFTER_SCRIPT": "another command",
    "MODEL_ENV_VARS": "environment variables of the run",
    "SKIP_PYTEST": "what the test does",
    "TEST_CASE": "what the test does",
}
_BACKSLASH = re.compile(r"\\(.)")
"""A character whose quoting outlives the first of the harness's two readings: xargs, then eval."""
_NODE = {"nproc-per-node": ("GPUS_PER_NODE", 8), "nnodes": ("SLURM_NNODES", 1)}
"""What the harness takes where its environment says nothing."""


def is_recipe(data: Mapping[str, Any]) -> bool:
    """Whether parsed YAML is a recipe."""
    return isinstance(data.get(ARGUMENTS), Mapping)


def read(data: Mapping[str, Any], given: Mapping[str, str] | None = None) -> Arguments:
    """The arguments of a recipe's first run; `given` are variables of its environment.

    Raises `PlanError` for a recipe that does not train.
    """
    if (mode := data.get("MODE", "pretraining")) != "pretraining":
        raise refuse("MODE", f"is {shown(mode)}; legal: pretraining, for a plan trains")
    written = _merged(data[ARGUMENTS])
    found = Arguments(ignored=_ignored(data))
    for key, value in written.items():
        _put(found, str(key).lstrip("-").replace("_", "-"), _filled(value, given or {}))
    for flag, (variable, default) in _NODE.items():
        own = _own(data, variable)
        found.flags.setdefault(flag, default if own is None else own)
        if own is None:
            found.defaults[flag] = (variable, default)
    return found


def _merged(data: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """A mapping with what it takes over by YAML's merge key (`<<: *BASE`)."""
    base = data.get("<<", {})
    if not isinstance(base, Mapping) or depth > 8:
        raise refuse("<<", f"is {shown(base)}; legal: an anchor of a mapping of arguments")
    own = {key: value for key, value in data.items() if key != "<<"}
    return {**_merged(base, depth + 1), **own} if base else own


def _own(data: Mapping[str, Any], variable: str) -> Any:
    for name in ("MODEL_ENV_VARS", "ENV_VARS"):
        section = data.get(name)
        inner = section.get(ARGUMENTS, section) if isinstance(section, Mapping) else None
        if isinstance(inner, Mapping) and variable in inner:
            return inner[variable]
    return None


def _put(found: Arguments, flag: str, value: Any) -> None:
    if value is None or value is False:
        word = "null" if value is None else "false"
        why = f"the harness passes the word {word}, which is no value of it; taken as not given"
        found.ignored.append(KeyNote(f"--{flag}", value, why))
    elif value != "":
        said = resolve_flag(flag, [Occurrence(flag, 0, (), [] if value is True else _words(value))])
        found.flags[flag] = said if isinstance(said, UndecidedValue) else said.value


def _filled(value: Any, given: Mapping[str, str]) -> Any:
    if not isinstance(value, str):
        return value
    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda m: given.get(m[1] or m[2], m[0]), value)


def _words(value: Any) -> list[Value]:
    text = str(value).strip()
    inner = re.fullmatch(r"\[([^\]]+)\]", text)
    if isinstance(value, list):
        parts = [str(part) for part in value]
    elif inner or " " not in text:
        parts = _split(inner[1] if inner else text)
    else:
        parts = [text]
    return [
        (Unknown(part, 0, unset=True) if "$" in part else Text(part, 0, True),) for part in parts
    ]


def _split(text: str) -> list[str]:
    try:
        return (
            [_BACKSLASH.sub(r"\1", part) for part in shlex.split(text)]
            if not text.startswith("(")
            else [text]
        )
    except ValueError:
        return [text]


def _ignored(data: Mapping[str, Any]) -> list[KeyNote]:
    found = []
    for key, value in data.items():
        more = isinstance(value, Mapping) and bool(re.search("ARGS", str(key)))
        why = (
            "arguments of another run, or of a template"
            if more
            else _WHYS.get(str(key), "a word of the test's harness")
        )
        if key != ARGUMENTS:
            found.append(KeyNote(str(key), shown(value), why))
    return found
