"""The keys of a foreign file: each is translated once, or reported as not translated, ignored,
assumed or unknown.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from workbench.data_files import read_data_file
from workbench.errors import SHOWN, PlanError, Problem, refuse
from workbench.interop.translation import KeyNote, MissingField
from workbench.units import bytes_text, gib_text
from workbench.untrusted_text import shown

T = TypeVar("T")
NO_FIELD = "a plan has no such field"
_COMMENT = re.compile(r"_*(?:comment|note|description)s?_*|(?://|#).*", re.IGNORECASE)
"""Keys that files without comments of their own keep them in."""


def key_names(software: str) -> dict[str, tuple[str, ...]]:
    """Lists of names that files of `software` may hold, from `data/foreign/`, where the version and
    date stand that they are of.
    """
    lists = read_data_file(f"data/foreign/{software}.yaml")["keys"]
    return {name: tuple(words.split()) for name, words in lists.items()}


@dataclass(frozen=True)
class UndecidedValue:
    """A value that the file leaves open: what it may be, each with its line (0: none), why, and
    what decides it.
    """

    values: tuple[tuple[str, int], ...]
    why: str
    hint: str

    def __str__(self) -> str:
        return " or ".join(text + f" (line {line})" * bool(line) for text, line in self.values)

    def message(self) -> str:
        """What a refusal says of it."""
        between = " and " if "twice" in self.why else " or "
        values = between.join(
            text[:60] + f" (line {line})" * bool(line) for text, line in self.values
        )
        return f"is {values}, {self.why}; or decide it with {self.hint}".replace(
            "say; or decide", "say; give"
        )


class ForeignKeys:
    """Dotted keys of one file with their values, and the account of what became of each."""

    def __init__(self, data: Mapping[str, Any], spell: str = "{}") -> None:
        """`data` nested or flat; `spell` is how a key is written in messages, e.g. `--{}`."""
        self._left = {key: value for key, value in flat(data).items() if value is not None}
        self._sections = set(_sections(data))
        self._taken: dict[str, Any] = {}
        self._spell = spell
        self.translated: list[str] = []
        self.untranslated: list[KeyNote] = []
        self.assumed: list[KeyNote] = []
        self.ignored: list[KeyNote] = []
        self.unknown: list[KeyNote] = []
        self.problems: list[Problem] = []
        """What was asked for and is left open by the file."""

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def has_key(self, key: str) -> bool:
        """Whether the file has `key`, read or not."""
        return key in self._left or key in self._taken

    def value(self, key: str) -> Any:
        """The value of `key`, whether read or not, and left as it is; None where absent."""
        return self._left.get(key, self._taken.get(key))

    def below(self, section: str) -> list[str]:
        """Keys of `section`, and itself where it holds a value, that are not read yet."""
        return [key for key in self._left if _below(key, section)]

    def name(self, key: str) -> str:
        """The key as the file spells it."""
        return self._spell.format(key)

    def sections(self, *names: str) -> None:
        """Refuse what stands where a section should: `names` hold keys, not a value. Raises
        `PlanError`.
        """
        for name in names:
            if self._left.get(name) == {}:
                del self._left[name]
            elif isinstance(found := self._left.get(name), UndecidedValue):
                raise refuse(self.name(name), found.message())
            elif name in self._left:
                said = self._left[name]
                shows = str(said) if isinstance(said, UndecidedValue) else shown(said)
                raise refuse(self.name(name), f"is {shows}; must be a mapping of keys to values")

    def take(self, key: str) -> Any:
        """The value of `key`, now translated; None where the file does not say it, or leaves it
        open (`problems`). Raises `PlanError` for a section of that name.
        """
        if key not in self._left:
            if key in self._sections and key not in self._taken:
                raise refuse(self.name(key), "is a mapping of keys; must be a value")
            return None
        if isinstance(found := self._left[key], UndecidedValue):
            del self._left[key]
            self.problems.append(Problem(self.name(key), found.message()))
            return None
        self.translated.append(self.name(key))
        self._taken[key] = self._left.pop(key)
        return self._taken[key]

    def with_open_values(self, build: Callable[[], T]) -> T:
        """Return what `build` makes of the keys. Raises `PlanError`, before any other for values
        that it took and the file leaves open.
        """
        try:
            found = build()
        except MissingField as error:
            raise MissingField([*self.problems, *error.problems], error.stand_ins) from None
        except PlanError:
            if self.problems:
                raise MissingField(self.problems, ()) from None
            raise
        if self.problems:
            raise MissingField(self.problems, ())
        return found

    def number(self, key: str, least: float = -math.inf, most: float = math.inf) -> float | None:
        """The number at `key`, within bounds; None where absent. Raises `PlanError`."""
        value = self.take(key)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not least <= value <= most
        ):
            raise refuse(
                self.name(key), f"is {shown(value)}; must be a number{_between(least, most)}"
            )
        try:
            return float(value)
        except OverflowError:
            raise refuse(self.name(key), "is too large for a number") from None

    def integer(self, key: str, least: float = 1, most: float = 2**53) -> int | None:
        """The integer at `key`, within bounds, also written as 5e8; None where absent. Raises
        `PlanError`.
        """
        value = self.take(key)
        if value is None:
            return None
        exact = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not exact or not least <= value <= most:
            raise refuse(
                self.name(key), f"is {shown(value)}; must be an integer{_between(least, most)}"
            )
        return int(value)

    def count(self, key: str) -> int | None:
        """The integer of at least 1 at `key`, written without a point or exponent; None where
        absent. Raises `PlanError`.
        """
        if isinstance(said := self._left.get(key), float):
            raise refuse(self.name(key), f"is {shown(said)}; must be an integer of at least 1")
        return self.integer(key)

    def renamed_integer(self, key: str, older: str, least: int = 1) -> int | None:
        """The integer at `key`, or at its `older` name. Raises `PlanError` where the two differ."""
        value, before = self.integer(key, least), self.integer(older, least)
        if None not in (value, before) and value != before:
            raise refuse(
                self.name(older),
                f"is {before}, but {self.name(key)}, its newer name, is {value}; keep one of them",
            )
        return before if value is None else value

    def flag(self, key: str) -> bool | None:
        """True or false at `key`; None where absent. Raises `PlanError`."""
        value = self.take(key)
        if isinstance(value, str):
            value = {"true": True, "yes": True, "false": False, "no": False}.get(
                value.lower(), value
            )
        if value is not None and not isinstance(value, bool):
            raise refuse(self.name(key), f"is {shown(value)}; legal: true, false")
        return value

    def text(self, key: str) -> str | None:
        """The text at `key`; None where absent. Raises `PlanError`."""
        value = self.take(key)
        if value is not None and not isinstance(value, str):
            raise refuse(self.name(key), f"is {shown(value)}; must be text")
        return value

    def choice(self, key: str, legal: Mapping[str, Any]) -> Any:
        """What `legal` says of the word at `key` (in any case of letters); None where absent.
        Raises `PlanError`.
        """
        value = self.take(key)
        if value is None:
            return None
        words = {word.lower(): found for word, found in legal.items()}
        if not isinstance(value, str | int | float) or str(value).lower() not in words:
            raise refuse(self.name(key), f"is {shown(value)}; legal: {', '.join(legal)}")
        return words[str(value).lower()]

    def is_undecided(self, key: str) -> bool:
        """Whether the file has `key` and leaves its value open."""
        return isinstance(self._left.get(key), UndecidedValue)

    def auto_keys(self) -> list[str]:
        """Keys whose value is the word auto."""
        return [key for key, value in self._left.items() if value == "auto"]

    def skip(self, key: str, why: str) -> Any:
        """Report `key` as not translated, and return its value; None where absent."""
        if key not in self._left:
            return None
        value = self._left.pop(key)
        value = str(value) if isinstance(value, UndecidedValue) else value
        self.untranslated.append(KeyNote(self.name(key), value, why))
        return value

    def mark_untranslated(self, key: str, why: str) -> None:
        """Report a key that was taken as not translated after all, or only in part."""
        assert key in self._taken, "only a key that was taken can be untranslated after all"
        if self.name(key) in self.translated:
            self.translated.remove(self.name(key))
        self.untranslated.append(KeyNote(self.name(key), self._taken[key], why))

    def ignore(self, what: str, value: Any, why: str) -> None:
        """Report something in the file that is no part of the configuration: a comment, another
        program's section.
        """
        self.ignored.append(KeyNote(what, value, why))

    def assume(self, field: str, value: Any, why: str) -> Any:
        """Report a field of the plan that the file does not set; returns `value`."""
        self.assumed.append(KeyNote(field, value, why))
        return value

    def finish(
        self,
        known: Collection[str],
        whys: Mapping[str, str],
        sections: Collection[str],
        lenient: bool,
    ) -> None:
        """Report all keys that are left; those that are neither `known` nor in open `sections`
        raise `PlanError`.

        `whys` maps a key, or the beginning of keys, to the reason why a plan does not hold it. With
        `lenient` an unknown key is reported with the rest.
        """
        words = sorted({*known, *self._taken, *whys})
        refused: list[Problem] = []
        for key in list(self._left):
            foreign = key not in known and key not in whys and not is_below(key, sections)
            if foreign and _COMMENT.fullmatch(key.rpartition(".")[2]):
                self.ignore(self.name(key), self._left.pop(key), "a comment")
                continue
            if foreign and not lenient:
                # A message lists so many: close keys are looked for slowly, and a file may hold any
                # number of others.
                refused.append(
                    unknown_key(
                        self.name(key), key, words if len(refused) < SHOWN else (), self._spell
                    )
                )
                continue
            why = _with_size(_why(key, whys), self._left[key])
            self.skip(key, "the format does not know this key" if foreign else why)
            if foreign:
                self.unknown.append(self.untranslated[-1])
        if refused:
            raise PlanError(refused)


def unknown_key(name: str, key: str, words: Collection[str], spell: str = "{}") -> Problem:
    """The refusal of a key that a format does not have, with the keys that are close."""
    close = ", ".join(spell.format(word) for word in (_close(key, words) if words else ()))
    hint = f" did you mean {close}?" * bool(close)
    return Problem(
        name,
        f"unknown key;{hint} To list unknown keys as not translated instead, read with lenient "
        "(--lenient)",
    )


def _close(key: str, words: Collection[str]) -> list[str]:
    """Keys whose last word is close to that of `key`, the closest first; of one name that in its
    own section.
    """
    section, _, last = key.rpartition(".")
    ends = {word: word.rpartition(".")[2] for word in words}
    near = difflib.get_close_matches(last, set(ends.values()), n=3, cutoff=0.7)
    rank = {end: place for place, end in enumerate(near)}
    found = [word for word, end in ends.items() if end in rank]
    return sorted(
        found, key=lambda word: (rank[ends[word]], word.rpartition(".")[0] != section, word)
    )[:3]


def flat(data: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; lists and empty mappings are values. Raises `PlanError` for a
    key not text.
    """
    rows: dict[str, Any] = {}
    for key, value in data.items():
        if not isinstance(key, str):
            raise refuse(
                above.rstrip(".") or str(key), f"the key {shown(key)} is not text; every key is"
            )
        if isinstance(value, Mapping) and value:
            rows |= flat(value, f"{above}{key}.")
        else:
            rows[f"{above}{key}"] = value
    return rows


def _sections(data: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Dotted keys that hold other keys."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield f"{above}{key}"
            yield from _sections(value, f"{above}{key}.")


def _between(least: float, most: float) -> str:
    low = f" of at least {least:g}" if least > -math.inf else ""
    return f"{low} and at most {most:g}" if math.inf > most != 2**53 else low


def _below(key: str, section: str) -> bool:
    return key == section or key.startswith(section + ".")


def _with_size(why: str, value: Any) -> str:
    """A reason with the key's number in it, and with the memory of so many 16-bit elements."""
    if "{" not in why:
        return why
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    known, text = 0 <= number <= 2**53, bytes_text if 0 < number < 2**19 else gib_text
    return why.format(
        value=shown(value), size=f"{text(2 * number)} in 16 bits" if known else "2 bytes an element"
    )


def is_below(key: str, sections: Collection[str]) -> bool:
    """True where `key` is one of `sections`, or stands in it."""
    return any(_below(key, section) for section in sections)


def _why(key: str, whys: Mapping[str, str]) -> str:
    best = max((start for start in whys if _below(key, start)), key=len, default=None)
    return NO_FIELD if best is None else whys[best]
