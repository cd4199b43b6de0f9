"""Megatron-LM's arguments as written: a shell command or script, a list of words, or a mapping, to
flags and values.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping
from typing import Any

from workbench.errors import refuse
from workbench.interop.foreign_keys import UndecidedValue, flat
from workbench.interop.foreign_text import Parsed
from workbench.interop.megatron import functional_recipes
from workbench.interop.megatron.flags import Occurrence, occurrences, resolve_flag
from workbench.interop.megatron.megatron_keys import KNOWN
from workbench.interop.megatron.scripts import Arguments, read
from workbench.interop.shell import Item, Text
from workbench.interop.translation import KeyNote
from workbench.safe_io import json_files, yaml_files
from workbench.untrusted_text import shown

_NEGATED = {
    "add-bias-linear": "disable-bias-linear",
    "overlap-p2p-comm": "no-overlap-p2p-communication",
    "add-position-embedding": "no-position-embedding",
    **{key.removeprefix("no-"): key for key in KNOWN if key.startswith("no-")},
}
_RENAMED = {
    "fp8": "fp8-format",
    "num-moe-experts": "num-experts",
    "layernorm-zero-centered-gamma": "apply-layernorm-1p",
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
}
"""Field of core's own configurations -> the argument of the same meaning."""
_ACTIVATIONS = {"swiglu": "swiglu", "squaredrelu": "squared-relu"}


def flags(source: str | Parsed) -> dict[str, Any]:
    """The flags alone of `arguments`."""
    return arguments(source).flags


def arguments(source: str | Parsed, given: Mapping[str, str] | None = None) -> Arguments:
    """Flag (without dashes, in kebab case) -> value: a number, text, a list of several, or True
    where none stands.

    `source` is a shell command or script, a list of words or a mapping, as text or parsed; `given`
    are a script's variables that are decided from outside. Raises `PlanError` for text that is no
    list of arguments.
    """
    if isinstance(source, str):
        start = source.lstrip("\ufeff \t\r\n")
        if _is_shell(source, start):
            return read(source.lstrip("\ufeff"), given)
        source = _parsed(source, start)
    if isinstance(source, Mapping):
        return (
            functional_recipes.read(source, given)
            if functional_recipes.is_recipe(source)
            else _of_mapping(source)
        )
    return _of_words(source)


def _is_shell(text: str, start: str) -> bool:
    if start.startswith(("{", "[")) or re.match(r"(?:#.*\n\s*)*-\s", start):
        return False
    return not re.match(r"(?:\s*(?:#.*)?\n)*\s*[\"']?(?:--)?[A-Za-z][\w-]*[\"']?\s*:(?:\s|$)", text)


def _parsed(text: str, start: str) -> Parsed:
    found = (
        json_files.parse(start, "file")
        if start.startswith(("{", "["))
        else yaml_files.parse(text, where="file")
    )
    if not isinstance(found, Mapping | list):
        raise refuse(
            "file",
            f"is {shown(found)}; must be arguments such as --num-layers 24, or a mapping of them",
        )
    return found


def _of_mapping(data: Mapping[str, Any]) -> Arguments:
    found: dict[str, Any] = {}
    off: list[KeyNote] = []
    for dotted, value in flat(data).items():
        key = dotted.rpartition(".")[2].lstrip("-").replace("_", "-")
        key = _RENAMED.get(key, key)
        if key == "activation-func" and value in _ACTIVATIONS:
            key, value = _ACTIVATIONS[value], True
        if key in _NEGATED and key not in KNOWN and isinstance(value, bool):
            key, value = _NEGATED[key], not value
        if value is False and key in KNOWN:
            off.append(KeyNote(f"--{key}", value, "off, as where it is not given"))
        elif value is not None:
            if key in found and found[key] != value:
                raise refuse(
                    f"--{key}", f"is {shown(found[key])} and {shown(value)}; keep one of them"
                )
            found[key] = value
    return Arguments(found, ignored=off)


def _of_words(items: list[Any]) -> Arguments:
    """A list's items: text with spaces that begins with a flag is several words."""
    words: list[Item] = []
    texts: dict[str, Any] = {}
    for k, item in enumerate(items):
        both = isinstance(item, str) and re.match(r"--[A-Za-z]\S*\s", item)
        for text in item.split() if both else [item]:
            if isinstance(text, int | float) and not isinstance(text, bool) and math.isfinite(text):
                text = repr(text) if abs(text) < 2**53 else text
            if not isinstance(text, str):
                texts[text := f"\0{k}"] = item
            words.append((Text(text, 0, True),))
    found: dict[str, list[Occurrence]] = {}
    for flag in occurrences(words, []):
        found.setdefault(flag.flag, []).append(flag)
    said = {name: resolve_flag(name, flags) for name, flags in found.items()}
    values = {
        name: one if isinstance(one, UndecidedValue) else one.value for name, one in said.items()
    }
    return Arguments({name: _back(value, texts) for name, value in values.items()})


def _back(value: Any, texts: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_back(item, texts) for item in value]
    return texts.get(value, value) if isinstance(value, str) else value


def command(
    variables: Mapping[str, str], world: Mapping[str, int], arguments: Mapping[str, Any]
) -> str:
    """A `torchrun` line that starts Megatron's pretrain_gpt.py with `arguments`, and with
    environment `variables`; True is a flag without a value, a list several words.
    """
    before = "".join(f"{key}={value} " for key, value in variables.items())
    launcher = " ".join(f"--{key} {value}" for key, value in world.items())
    lines = [f"{before}torchrun {launcher} pretrain_gpt.py"]
    for key, value in arguments.items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        words = (shlex.quote(v) if isinstance(v, str) else json.dumps(v) for v in values)
        lines.append(" ".join((f"  --{key}", *words)))
    return " \\\n".join(lines) + "\n"
