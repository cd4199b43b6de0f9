"""Hjson that others wrote: JSON with comments, optional commas and quotes, as DeepSpeed reads its
configuration (https://hjson.github.io/syntax.html).
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from workbench.errors import PlanError, refuse
from workbench.safe_io import json_files

DEEPEST = 100
"""Objects and arrays within each other: no configuration is near it."""
_SPACE = re.compile(r"(?:[\x00-\x20\ufeff]|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_KEY = re.compile(r"[^\s{}\[\],:]+")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"' + r"|'(?:[^'\\\n]|\\.)*'")
_SEVERAL_LINES = re.compile(r"'''[ \t]*\n?(.*?)\n?[ \t]*'''", re.DOTALL)
_LITERAL = re.compile(
    r"(true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?)[ \t\r]*"
    r"(?=[,}\]#\n]|//|/\*|\Z)"
)
_TO_THE_END = re.compile(r"[^\n]*")


def parse(text: str, where: str) -> Any:
    """The value of Hjson `text`; the braces of the outermost object may be left out.

    Raises `PlanError` naming line and column, or a key that is written twice.
    """
    reader = _Reader(text, where)
    found = reader.value(0) if reader.next() in ("{", "[") else reader.members(0, "")
    if reader.next():
        reader.fail("something stands behind the end")
    return found


class _Reader:
    """A position in the text, which only moves on."""

    def __init__(self, text: str, where: str) -> None:
        self._text, self._where, self._at = text, where, 0

    def next(self) -> str:
        """The next character behind space and comments; empty at the end."""
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at
        if self._text.startswith("/*", self._at):
            self.fail("a comment is not closed")
        return self._text[self._at : self._at + 1]

    def fail(self, why: str) -> NoReturn:
        """Refuse the text where it is read."""
        before = self._text[: self._at]
        line, column = before.count("\n") + 1, self._at - before.rfind("\n")
        raise refuse(
            self._where, f"not valid JSON at line {line}, column {column}: {why} (read as Hjson)"
        )

    def value(self, depth: int) -> Any:
        """The value that begins here."""
        first = self.next()
        if depth > DEEPEST:
            raise refuse(self._where, "not valid JSON: nested too deeply (read as Hjson)")
        if first and first in "{[":
            self._at += 1
            return self.members(depth, "}") if first == "{" else self._items(depth)
        if found := self._take(_SEVERAL_LINES):
            return found[1]
        if first and first in "\"'":
            return self._quoted()
        if not first or first in "}],:":
            self.fail(f"a value is missing before {first!r}" if first else "a value is missing")
        if found := self._take(_LITERAL):
            return self._json(found[1])
        return (self._take(_TO_THE_END) or [""])[0].strip()

    def members(self, depth: int, end: str) -> dict[str, Any]:
        """Keys and values up to `end`."""
        found: dict[str, Any] = {}
        while (first := self.next()) != end:
            if not first:
                self.fail("an object is not closed")
            name = self._quoted() if first in "\"'" else (self._take(_KEY) or [""])[0]
            if not name and first not in "\"'":
                self.fail(f"a key is missing before {first!r}")
            if self.next() != ":":
                self.fail(f"':' is missing behind the key {name[:40]!r}")
            if name in found:
                raise refuse(name, "is written twice; keep one of them")
            self._at += 1
            found[name] = self.value(depth + 1)
            self._comma()
        self._at += len(end)
        return found

    def _items(self, depth: int) -> list[Any]:
        found = []
        while (first := self.next()) != "]":
            if not first:
                self.fail("an array is not closed")
            found.append(self.value(depth + 1))
            self._comma()
        self._at += 1
        return found

    def _comma(self) -> None:
        if self.next() == ",":
            self._at += 1

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        if match:
            self._at = match.end()
        return match

    def _quoted(self) -> str:
        quoted = self._take(_QUOTED)
        if quoted is None:
            self.fail("a quoted text is not closed on its line")
        body = quoted[0][1:-1]
        if quoted[0][0] == "'":
            body = re.sub(r'\\.|"', lambda m: {"\\'": "'", '"': '\\"'}.get(m[0], m[0]), body)
        return str(self._json(f'"{body}"'))

    def _json(self, text: str) -> Any:
        try:
            return json_files.parse(text, self._where)
        except PlanError as error:
            self.fail(error.problems[0].message.partition(": ")[2])
