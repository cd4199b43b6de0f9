"""Values of a shell script that is read and not run: text whose line is known, with what cannot be
known in between.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

LONGEST = 200_000
"""Characters and pieces of the longest value that is kept: no list of arguments is near it."""
MOST = 16
"""Alternatives of a word that are kept apart; with more it is unknown."""


@dataclass(frozen=True)
class Text:
    """Characters that stand in the file."""

    text: str
    line: int
    quoted: bool = False
    default: str = ""
    """The environment variable whose default this is, where it is one."""


@dataclass(frozen=True)
class Unknown:
    """What only a run would know, as the file writes it: `$1`, `$(date)`, a variable that the file
    does not set.
    """

    text: str
    line: int
    quoted: bool = False
    unset: bool = False
    """Whether it is a variable that nothing sets, rather than something computed."""


@dataclass(frozen=True)
class Either:
    """Values of which one holds, by a condition that cannot be decided here."""

    choices: tuple[Value, ...]
    why: str
    quoted: bool = False


@dataclass(frozen=True)
class Break:
    """The border between two elements of an array."""


Piece = Text | Unknown | Either | Break
Value = tuple[Piece, ...]


@dataclass(frozen=True)
class Branch:
    """Words of which one list holds, by a condition that cannot be decided here."""

    choices: tuple[tuple[Item, ...], ...]
    why: str


Item = Value | Branch
"""A word, or lists of words of which one holds."""


def quoted(value: Value, on: bool = True) -> Value:
    """The value as it stands in double quotes (or, with `on` false, outside of them)."""
    return tuple(
        piece if isinstance(piece, Break) else replace(piece, quoted=on) for piece in value
    )


def flattened(value: Value) -> Value:
    """The value as one text: a space for each border between elements."""
    found: list[Piece] = []
    for piece in value:
        if isinstance(piece, Either):
            piece = replace(piece, choices=tuple(map(flattened, piece.choices)))
        found.append(Text(" ", 0) if isinstance(piece, Break) else piece)
    return tuple(found)


def shown_value(value: Value) -> str:
    """The value for people: what is unknown as the file writes it, alternatives with `|`."""
    return "".join(map(_shown, value))


def _shown(piece: Piece) -> str:
    if isinstance(piece, Break):
        return " "
    return (
        "|".join(dict.fromkeys(map(shown_value, piece.choices)))
        if isinstance(piece, Either)
        else piece.text
    )


def weight(value: Value, most: int = LONGEST) -> int:
    """Characters and pieces of a value; stops to count above `most`."""
    total = 0
    for piece in value:
        total += 1 + len(getattr(piece, "text", ""))
        for choice in piece.choices if isinstance(piece, Either) else ():
            total += weight(choice, most - total)
        if total > most:
            break
    return total


def line_of(value: Value) -> int:
    """The first line in the value; 0 where it has none."""
    for piece in value:
        if isinstance(piece, Text | Unknown) and piece.line:
            return piece.line
        if isinstance(piece, Either) and (
            lines := [n for choice in piece.choices if (n := line_of(choice))]
        ):
            return min(lines)
    return 0


def merge(values: Sequence[Value], why: str) -> Value:
    """One value where any of `values` may hold: what they have in common at both ends, and the rest
    side by side.
    """
    distinct = list({shown_value(value): value for value in values}.values())
    if len(distinct) == 1:
        return distinct[0]
    front = _common(distinct)
    rest = [value[front:] for value in distinct]
    back = _common([value[::-1] for value in rest])
    middle = tuple(value[: len(value) - back] for value in rest)
    return (*distinct[0][:front], Either(middle, why), *rest[0][len(rest[0]) - back :])


def _common(values: Sequence[Value]) -> int:
    count = 0
    for pieces in zip(*values, strict=False):
        if any(piece != pieces[0] for piece in pieces):
            break
        count += 1
    return count


def alternatives(value: Value) -> list[Value]:
    """The value without `Either`: one for each combination of choices; more than `MOST` are one
    that is unknown.
    """
    parts: list[list[Value]] = []
    count = 1
    for piece in value:
        found: list[Value] = [(piece,)]
        if isinstance(piece, Either):
            found = [deeper for choice in piece.choices for deeper in alternatives(choice)]
        count *= len(found)
        if count > MOST:
            return [(Unknown(shown_value(value)[:200], line_of(value)),)]
        parts.append(found)
    return [tuple(itertools.chain(*combination)) for combination in itertools.product(*parts)]


def literal(value: Value) -> str | None:
    """The text of a value that is known; None where it is not."""
    if all(isinstance(piece, Text) for piece in value):
        return "".join(piece.text for piece in value if isinstance(piece, Text))
    found = {_plain(choice) for choice in alternatives(value)}
    return found.pop() if len(found) == 1 else None


def _plain(value: Value) -> str | None:
    return (
        None if any(isinstance(piece, Unknown | Break) for piece in value) else shown_value(value)
    )


def defaults(value: Value) -> dict[str, str]:
    """Environment variable -> its default, for the defaults in a value."""
    return {
        piece.default: piece.text for piece in value if isinstance(piece, Text) and piece.default
    }


def split(value: Value) -> list[Item]:
    """The words of a value: unquoted text splits at spaces, arrays at their borders."""
    found: list[Item] = []
    word: list[Piece] = []

    def end() -> None:
        if word:
            found.append(tuple(word))
            word.clear()

    pieces = [
        piece
        for piece in value
        if not (isinstance(piece, Text) and not piece.text and not piece.quoted)
    ]
    for k, piece in enumerate(pieces):
        if isinstance(piece, Break):
            end()
        elif isinstance(piece, Text) and not piece.quoted:
            for part in re.split(r"(\s+)", piece.text):
                if part.isspace():
                    end()
                elif part:
                    word.append(replace(piece, text=part))
        elif (
            isinstance(piece, Either)
            and not piece.quoted
            and (_spaced(piece) or (not word and _ends(pieces, k)))
        ):
            end()
            found.append(_branch(piece))
        else:
            word.append(piece)
    end()
    return found


def _ends(pieces: Sequence[Piece], k: int) -> bool:
    after = pieces[k + 1] if k + 1 < len(pieces) else Break()
    return isinstance(after, Break) or (
        isinstance(after, Text) and not after.quoted and after.text[:1].isspace()
    )


def _spaced(piece: Either) -> bool:
    return any(
        isinstance(inner, Break)
        or (isinstance(inner, Text) and bool(re.search(r"\s", inner.text)))
        or (isinstance(inner, Either) and _spaced(inner))
        for choice in piece.choices
        for inner in choice
    )


def _branch(piece: Either) -> Item:
    choices = tuple(tuple(split(quoted(choice, False))) for choice in piece.choices)
    words = [
        choice[0] for choice in choices if len(choice) == 1 and not isinstance(choice[0], Branch)
    ]
    return (
        (Either(tuple(words), piece.why),)
        if len(words) == len(choices)
        else Branch(choices, piece.why)
    )
