"""The arguments of one file, asked for by what they mean, whatever its framework calls them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from workbench.errors import refuse
from workbench.interop.foreign_keys import ForeignKeys
from workbench.interop.trainer.dialects import SPELLING, Dialect, spellings
from workbench.interop.translation import DEFAULT

_NUMBER = re.compile(r"[+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")


LARGEST = 2.0**53
"""Largest number that a file may hold."""


class Arguments:
    """Arguments of a file with their account (`keys`), named by their meaning (`dialects`)."""

    def __init__(self, data: Mapping[str, Any], dialect: Dialect) -> None:
        """`data` is the parsed file. Raises `PlanError` where one thing is said by two names."""
        self.dialect = dialect
        self.keys = ForeignKeys({key: _plain(value) for key, value in data.items()})
        for key in (key for key, value in data.items() if value == ""):
            self.keys.ignore(key, "", "empty, which says nothing")
        for each in SPELLING[dialect.format].values():
            names = [name for name in each if data.get(name) is not None]
            if len(names) > 1 and data[names[0]] != data[names[1]]:
                raise refuse(
                    names[1], f"is another name of {names[0]}, and says otherwise; keep one of them"
                )

    def key(self, meaning: str) -> str:
        """The file's name of an argument; today's where the file does not have it."""
        names = spellings(self.dialect.format, meaning)
        return next((name for name in names if self.keys.has_key(name)), names[0])

    def has(self, meaning: str) -> bool:
        """True where the file says it; empty text and null say nothing."""
        return self.keys.has_key(self.key(meaning))

    def default(self, meaning: str) -> Any:
        """Value that the framework takes where the file has none; None where nothing is known."""
        return self.dialect.defaults.get(spellings(self.dialect.format, meaning)[0])

    def assume(self, field: str, value: Any, meaning: str = "") -> Any:
        """Report a field of the plan as the framework's default of an argument."""
        of = f" of {self.key(meaning)}" if meaning else ""
        return self.keys.assume(field, value, f"{self.dialect.whose}'s default{of}")

    def number(self, meaning: str, field: str) -> Any:
        """The number of a field of the plan, as the file says it or by default."""
        found = self.keys.number(self.key(meaning), 0, LARGEST)
        if found is None and (usual := self.default(meaning)) is not None:
            return self.assume(field, float(usual), meaning)
        return self.keys.assume(field, DEFAULT, "the plan's default") if found is None else found

    def integer(self, meaning: str, field: str) -> int:
        """The integer that a field of the plan follows from, likewise."""
        found = self.keys.integer(self.key(meaning))
        if found is None:
            found = int(self.default(meaning))
            why = f"{self.dialect.whose}'s default of {self.key(meaning)}: {found}"
            self.keys.assume(field, DEFAULT, why)
        return found

    def flag(self, meaning: str, field: str = "") -> bool:
        """True where something is on, as the file says it or by default (reported as `field`)."""
        found = self.keys.flag(self.key(meaning))
        if found is None:
            found = bool(self.default(meaning))
            if field:
                self.assume(field, found, meaning)
        return found

    def word(self, meaning: str) -> str | None:
        """The word of an argument in lower case, as the file says it or by default."""
        found = self.keys.take(self.key(meaning))
        if found is None:
            found = self.default(meaning)
        if found is not None and not isinstance(found, str | bool):
            raise refuse(self.key(meaning), f"is {found!r:.60}; must be text")
        return None if found is None else str(found).lower()


def _plain(value: Any) -> Any:
    """A value as its framework reads it: text that is a number is one, empty text says nothing."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()) and len(value) < 40:
        number = float(value)
        return int(number) if number.is_integer() and not re.search(r"[.eE]", value) else number
    return None if value == "" else value
