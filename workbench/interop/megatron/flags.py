"""Words of a command as Megatron-LM's flags: what each is said to be, where, and where the file
leaves it open.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.interop.foreign_keys import UndecidedValue
from workbench.interop.megatron.megatron_keys import FIELDS, SWITCHES
from workbench.interop.shell import (
    Branch,
    Either,
    Item,
    Text,
    Unknown,
    Value,
    alternatives,
    shown_value,
)
from workbench.interop.shell.values import defaults, line_of

_FLAG = re.compile(r"--[A-Za-z]")
_HOLDS_ARGUMENTS = re.compile(r"ARG|OPT|FLAG|EXTRA|PARAM|CMD|[$]@", re.IGNORECASE)
When = tuple[tuple[int, int, int, str], ...]
"""The branches in which a word stands: (which, choice, of how many, the condition)."""


@dataclass
class Occurrence:
    """A flag where it stands, with its values' words."""

    flag: str
    line: int
    when: When
    values: list[Value] = field(default_factory=list)


@dataclass(frozen=True)
class Said:
    """One value that a flag may have; `value` is None where the flag is not there, `text` what the
    file writes.
    """

    value: Any
    text: str
    line: int
    known: bool = True
    default: str = ""
    """The environment variable whose default the value is."""


def value_of(word: str) -> Any:
    """A word as argparse takes it: 24, 220_000_000 and 6.0e-5 are numbers."""
    if re.fullmatch(r"[-+]?\d+(?:_\d+)*", word) and len(word) <= 21:
        return int(word)
    if re.fullmatch(
        r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?", word
    ) and not word.endswith("_"):
        return float(word)
    return word


def occurrences(items: Iterable[Item], loose: list[Value], when: When = ()) -> list[Occurrence]:
    """The flags among words, in order; `loose` gets the words that follow no flag."""
    found: list[Occurrence] = []
    current: Occurrence | None = None
    for item in items:
        if isinstance(item, tuple) and (several := _several(item)):
            item = several
        if isinstance(item, Branch):
            if (
                current is not None
                and not any(map(_holds_flag, item.choices))
                and all(item.choices)
            ):
                current.values.append((Either(tuple(map(_glued, item.choices)), item.why),))
                continue
            for k, choice in enumerate(item.choices):
                branch = (id(item), k, len(item.choices), item.why)
                found += occurrences(choice, loose, (*when, branch))
            current = None
        elif _FLAG.match(shown_value(item)):
            name, value = _cut(item)
            current = Occurrence(
                name.replace("_", "-"), line_of(item), when, [] if value is None else [value]
            )
            found.append(current)
            current = current if value is None else None
        elif current is None or _is_loose(current, item):
            loose.append(item)
        else:
            current.values.append(item)
    return found


def _several(word: Value) -> Branch | None:
    """A flag whose name is one of several (`--$DTYPE`), as a branch of them."""
    if not shown_value(word).startswith("--") or all(isinstance(piece, Text) for piece in word):
        return None
    before = tuple(
        itertools.takewhile(lambda piece: not (isinstance(piece, Text) and "=" in piece.text), word)
    )
    choices = alternatives(before)
    why = next((piece.why for piece in before if isinstance(piece, Either)), "")
    rest = word[len(before) :]
    return (
        Branch(tuple(((*choice, *rest),) for choice in choices), why) if len(choices) > 1 else None
    )


def _holds_flag(items: Sequence[Item]) -> bool:
    return any(
        any(map(_holds_flag, item.choices))
        if isinstance(item, Branch)
        else bool(_FLAG.match(shown_value(item)))
        for item in items
    )


def _glued(items: Sequence[Item]) -> Value:
    words = [item if isinstance(item, tuple) else (Unknown("...", 0),) for item in items]
    return tuple(
        piece for k, word in enumerate(words) for piece in (*((Text(" ", 0),) * (k > 0)), *word)
    )


def _is_loose(current: Occurrence, word: Value) -> bool:
    """Whether a word that is not known is no value of the flag before it, but arguments of its
    own.
    """
    alone = len(word) == 1 and isinstance(word[0], Unknown)
    return alone and (current.flag in SWITCHES or bool(_HOLDS_ARGUMENTS.search(shown_value(word))))


def _cut(word: Value) -> tuple[str, Value | None]:
    """(name of the flag, its value behind `=`)."""
    name = ""
    for k, piece in enumerate(word):
        text = piece.text if isinstance(piece, Text) else shown_value((piece,))
        if isinstance(piece, Text) and "=" in text:
            head, _, tail = text.partition("=")
            rest = (Text(tail, piece.line, piece.quoted, piece.default), *word[k + 1 :])
            return (name + head)[2:], tuple(
                p for p in rest if not isinstance(p, Text) or p.text
            ) or rest
        name += text
    return name[2:], None


def said(flag: Occurrence) -> list[Said]:
    """What a flag may be where it stands."""
    found = []
    for chosen in itertools.product(*(alternatives(value) for value in flag.values)):
        pieces = tuple(itertools.chain(*chosen))
        text = " ".join(map(shown_value, chosen))
        known = not any(isinstance(piece, Unknown) for piece in pieces)
        values = [
            value_of(part) for word in chosen for part in ([shown_value(word)] if len(word) else [])
        ]
        values = [value for value in values if value != ""]
        value = True if not values else values[0] if len(values) == 1 else values
        line = line_of(pieces) or flag.line
        found.append(Said(value, text, line, known, next(iter(defaults(pieces)), "")))
    return found


def resolve_flag(name: str, found: Sequence[Occurrence]) -> Said | UndecidedValue:
    """What a flag is, where all its occurrences agree; else all that it may be, for whoever needs
    it to refuse.
    """
    sure = [one for flag in found if not flag.when for one in said(flag)]
    maybe = [one for flag in found if flag.when for one in said(flag)]
    lacks = not any(not flag.when for flag in found) and not _covered(found)
    options = {repr(one.value) if one.known else one.text: one for one in (*sure, *maybe)}
    if len(options) == 1 and not lacks:
        one = next(iter(options.values()))
        if one.known:
            return one
        return UndecidedValue(
            ((one.text, one.line),), "whose value the file does not say", _hint(name, one.text)
        )
    why = next((branch[3] for flag in found for branch in flag.when if branch[3]), "")
    why = why or next(
        (
            piece.why
            for flag in found
            for value in flag.values
            for piece in value
            if isinstance(piece, Either)
        ),
        "",
    )
    places = [(one.text or "given", one.line) for one in options.values()] + [
        ("not given", 0)
    ] * lacks
    ends = f"which {why} decides" if why else "written twice; keep one of them"
    return UndecidedValue(tuple(places), ends, _hint(name, why))


def _hint(name: str, text: str) -> str:
    """What decides a flag: its own value, or a variable of the script that stands in `text`."""
    variables = re.findall(r"\$\{?([A-Z_][A-Z0-9_]*|\d{1,2})(?![\w(])", text)
    more = f", or --set {variables[0]}=VALUE, which the script reads" if variables else ""
    return f"--set {FIELDS.get(name, name)}=VALUE{more}"


def _covered(found: Sequence[Occurrence]) -> bool:
    """Whether the occurrences stand in every choice of some branch."""
    choices: dict[int, set[int]] = {}
    counts: dict[int, int] = {}
    for flag in found:
        for which, choice, count, _ in flag.when[:1]:
            inner = [f for f in found if f.when[:1] and f.when[0][:2] == (which, choice)]
            deeper = [Occurrence(f.flag, f.line, f.when[1:], f.values) for f in inner]
            if any(not f.when for f in deeper) or _covered(deeper):
                choices.setdefault(which, set()).add(choice)
                counts[which] = count
    return any(len(choices[which]) == counts[which] for which in choices)
