"""Megatron-LM's arguments as written: a shell command or script, a list of words, or a mapping, to flags and values."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from workbench.plan import yamlio
from workbench.plan.errors import refuse
from workbench.plan.foreign.keys import flat, shown
from workbench.plan.foreign.texts import Parsed, from_json

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_ENDS = frozenset({"$@", "$*", "&&", "||", "|", ";", "&", ")", "do", "done", "fi"})
_NEGATED = {"add-bias-linear": "disable-bias-linear", "overlap-p2p-comm": "no-overlap-p2p-communication",
            "add-position-embedding": "no-position-embedding"}  # fmt: skip
_RENAMED = {"fp8": "fp8-format"}


def flags(source: str | Parsed) -> dict[str, Any]:
    """Flag (without dashes, in kebab case) -> value: a number, text, a list of several, or True where none stands.

    Shell variables with a literal value in the same text are filled in. Raises `PlanError` for text that is no list
    of arguments, and for a flag that is written twice.
    """
    data = _parsed(source) if isinstance(source, str) else source
    return _of_mapping(data) if isinstance(data, Mapping) else _of_words(_listed(data))


def _parsed(text: str) -> Parsed:
    start = text.lstrip("\ufeff \t\r\n")
    if start.startswith(("{", "[")):
        found = from_json(start, "file")
    elif re.match(r"(?:#.*\n\s*)*-\s", start) or (not re.search(r"--[A-Za-z]", text) and ":" in text):
        found = yamlio.parse(text, where="file")
    else:
        found = _words(text, lines=True)
    if not isinstance(found, Mapping | list):
        raise refuse("file", f"is {shown(found)}; must be arguments such as --num-layers 24, or a mapping of them")
    return found


def _words(text: str, lines: bool = False) -> list[str]:
    """The words of shell text; with `lines`, `;` stands where a line ends a command."""
    bare = re.sub(r"(?m)(^|[ \t])#.*$", r"\1", re.sub(r"\\\r?\n", " ", text))
    try:
        return shlex.split(_ended(bare) if lines else bare)
    except ValueError as error:
        raise refuse("file", f"is no shell command: {str(error).lower()}") from None


def _ended(text: str) -> str:
    """`text` with `;` before each newline that stands in no quotes and no parentheses."""
    quote, depth, found = "", 0, []
    for mark in text:
        if quote:
            quote = "" if mark == quote else quote
        elif mark in "'\"":
            quote = mark
        else:
            depth += (mark == "(") - (mark == ")")
        found.append(" ;\n" if mark == "\n" and not quote and depth <= 0 else mark)
    return "".join(found)


def _listed(items: Iterable[Any]) -> list[Any]:
    """A list's items, those that hold a flag and its value as one text split."""
    found: list[Any] = []
    for item in items:
        both = isinstance(item, str) and re.match(r"--[A-Za-z]\S*\s", item)
        found += _words(item) if both else [item]
    return found


def _of_mapping(data: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dotted, value in flat(data).items():
        key = dotted.rpartition(".")[2].lstrip("-").replace("_", "-")
        key = _RENAMED.get(key, key)
        if key in _NEGATED and isinstance(value, bool):
            key, value = _NEGATED[key], not value
        if value is not None and value is not False:
            _put(found, key, value)
    return found


def _of_words(words: list[Any]) -> dict[str, Any]:
    found: dict[str, list[Any]] = {}
    variables: dict[str, str] = {}
    current: str | None = None
    for word in _opened(words):
        if isinstance(word, str) and re.match(r"--[A-Za-z]", word):
            key, equals, value = word[2:].partition("=")
            current = key.replace("_", "-")
            _put(found, current, [_value(_filled(value, variables))] if equals else [])
        elif isinstance(word, str) and (assigned := _ASSIGNED.fullmatch(word)):
            variables[assigned[1]] = _filled(assigned[2], variables)
            current = None
        elif isinstance(word, str) and (word in _ENDS or word.startswith((">", "2>", "<")) or "[@]}" in word):
            current = None
        elif isinstance(word, str) and word.endswith(".py"):
            current = None  # the script itself, behind its launcher's words
        elif current is not None and (value := _filled(word, variables) if isinstance(word, str) else word) != "":
            found[current].append(_value(value) if isinstance(value, str) else value)
    return {key: values[0] if len(values) == 1 else values or True for key, values in found.items()}


def _opened(words: Iterable[Any]) -> Iterable[Any]:
    """Words with shell arrays and quoted lists of arguments (`ARGS=( --bf16 )`, `ARGS="--bf16"`) taken apart."""
    for word in words:
        if not isinstance(word, str):
            yield word
            continue
        assigned = _ASSIGNED.fullmatch(word)
        if assigned and (assigned[2].startswith("(") or re.search(r"(?:^|\s)--[A-Za-z]", assigned[2])):
            yield f"{assigned[1]}="  # its words stand here, so where it is used it adds nothing
            yield from _opened(_words(assigned[2].lstrip("(")))
            if not assigned[2].startswith("("):
                yield ")"
        elif word.endswith(")") and len(word) > 1 and word.count("(") < word.count(")"):
            yield from (word[:-1], ")")
        else:
            yield word


def _put(found: dict[str, Any], key: str, value: Any) -> None:
    if key in found:
        raise refuse(f"--{key}", "is written twice; keep one of them")
    found[key] = value


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """`text` with the variables that have a known value; others stay, for whoever needs the value to refuse."""
    return _VARIABLE.sub(lambda m: variables.get(m[1] or m[2], m[3] if m[3] is not None else m[0]), text)


def _value(word: str) -> Any:
    if re.fullmatch(r"[-+]?\d{1,20}", word):
        return int(word)
    if re.fullmatch(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?", word):
        return float(word)
    return word


def command(world: Mapping[str, int], arguments: Mapping[str, Any]) -> str:
    """A `torchrun` line that starts Megatron's pretrain_gpt.py with `arguments`; True is a flag without a value."""
    launcher = " ".join(f"--{key} {value}" for key, value in world.items())
    lines = [f"torchrun {launcher} pretrain_gpt.py"]
    for key, value in arguments.items():
        word = "" if value is True else f" {shlex.quote(value) if isinstance(value, str) else json.dumps(value)}"
        lines.append(f"  --{key}{word}")
    return " \\\n".join(lines) + "\n"
