"""Foreign text to plain data and back."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from workbench.errors import PlanError, refuse
from workbench.safe_io import hjson_files, json_files, yaml_files
from workbench.untrusted_text import shown, visible

Parsed = Mapping[str, Any] | list[Any]


def from_braces(text: str, where: str) -> Any:
    """The value of `text`, which is JSON, or YAML that may begin with a brace. Raises
    `PlanError`.
    """
    if not text.lstrip("\ufeff \t\r\n").startswith("{"):
        return yaml_files.parse(text, where=where)
    try:
        json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        try:
            return yaml_files.parse(text, where=where)
        except PlanError as error:
            if "not valid YAML" not in str(error):
                raise
    except ValueError:
        pass
    return json_files.parse(text, where)


def from_hjson(text: str, where: str) -> Any:
    """The value of a ds_config.json, which DeepSpeed reads as Hjson: JSON with comments, and with
    commas, quotes and the outermost braces left out; YAML is read too. Raises `PlanError`.
    """
    if not (_bare(text).startswith(("{", "[")) or _COMMENT.search(text)):
        try:
            return yaml_files.parse(text, where=where)
        except PlanError:
            return hjson_files.parse(text, where)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        try:
            return hjson_files.parse(text, where)
        except PlanError as error:
            with suppress(PlanError):
                return yaml_files.parse(text, where=where)
            raise error from None
    return json_files.parse(text, where)


_COMMENT = re.compile(r"(?m)(?:^|[\s{},\[])(?://|/\*)")
"""A comment that YAML does not know; `//` within an address is none."""


def _bare(text: str) -> str:
    """`text` from the first character on that is neither space nor of a comment."""
    return re.sub(r"\A(?:[\s\ufeff]|#[^\n]*|//[^\n]*|/\*.*?\*/)*", "", text, flags=re.DOTALL)


def begins_with_brace(text: str) -> bool:
    """True where a text is an object in braces, behind what comments stand before it."""
    return _bare(text).startswith("{")


def from_toml(text: str, where: str) -> dict[str, Any]:
    """The tables of TOML `text`. Raises `PlanError` naming line and column, or what is written
    twice and where.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise refuse(where, "not valid TOML: nested too deeply") from None
    except ValueError as error:
        raise _twice(text, str(error)) or refuse(
            where, f"not valid TOML: {str(error)[:200]}"
        ) from None


def _twice(text: str, message: str) -> PlanError | None:
    """The refusal of a key or table that TOML `text` has twice; None where `message` is about
    anything else.
    """
    at = re.search(r"^Cannot (?:overwrite|declare).*\(at line (\d+)", message)
    last = int(at[1]) if at else 0
    table, seen = "", dict[str, int]()
    for number, line in enumerate(text.splitlines()[:last], start=1):
        header, pair = re.match(r"\s*\[([\w.-]+)\]", line), re.match(r"\s*([\w.-]+)\s*=", line)
        table = header[1] if header else table
        name = table if header else f"{table}.{pair[1]}".lstrip(".") if pair else ""
        if number == last and name in seen:
            return refuse(
                name, f"is written twice (lines {seen[name]} and {last}); keep one of them"
            )
        seen.setdefault(name, number)
    return None


def to_toml(data: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of plain values as TOML: numbers, text, true and false, and lists of them."""
    parts = [
        f"[{table}]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in rows.items())
        for table, rows in data.items()
    ]
    return "\n".join(parts)


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but TOML also wants DEL escaped, and readers what they cannot
        # see.
        written = json.dumps(value, ensure_ascii=False)
        return "".join(char if visible(char) else f"\\u{ord(char):04x}" for char in written)
    return json.dumps(value)


def mapping(value: Any, where: str) -> dict[str, Any]:
    """`value` if it is a mapping. Raises `PlanError`."""
    if not isinstance(value, Mapping):
        raise refuse(where, f"is {shown(value)}; must be a mapping of keys to values")
    return dict(value)
