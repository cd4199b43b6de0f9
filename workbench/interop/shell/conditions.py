"""Conditions of a shell script, `[ $A == 1 ]`, where what they compare is known."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from workbench.interop.shell.values import (
    MOST,
    Text,
    Unknown,
    Value,
    alternatives,
    literal,
    shown_value,
)
from workbench.interop.shell.words import Words

if TYPE_CHECKING:
    from tree_sitter import Node

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
}
_DecidedBy = dict[str, str]


def decide(node: Node, words: Words, decided_by: _DecidedBy) -> bool | None:
    """Whether a condition holds; None where that is not known.

    `decided_by` gets the environment variables whose default (or absence) decided it.
    """
    kind = node.type
    if kind in ("test_command", "parenthesized_expression", "redirected_statement"):
        inner = [child for child in node.named_children if child.type != "comment"]
        return decide(inner[0], words, decided_by) if inner else None
    if kind in ("negated_command", "negation_expression"):
        return _not(decide(node.named_children[0], words, decided_by))
    if kind == "list":
        first, last = (
            decide(child, words, decided_by)
            for child in (node.named_children[0], node.named_children[-1])
        )
        return (
            _both(first, last) if any(c.type == "&&" for c in node.children) else _any(first, last)
        )
    if kind == "command":
        return {"true": True, "false": False, ":": True}.get(words.source.of(node).strip())
    if kind == "unary_expression":
        return _unary(node, words, decided_by)
    if kind == "binary_expression":
        return _binary(node, words, decided_by)
    if kind in ("word", "string", "simple_expansion", "expansion", "number"):
        text = _known(words.value(node, True), decided_by)
        return None if text is None else bool(text)
    return None


def _unary(node: Node, words: Words, decided_by: _DecidedBy) -> bool | None:
    sign = words.source.of(node.children[0])
    if sign == "!":
        return _not(decide(node.children[-1], words, decided_by))
    if sign not in ("-z", "-n"):
        return None
    value = words.value(node.children[-1], True)
    pieces = [piece for piece in value if not (isinstance(piece, Text) and not piece.text)]
    if len(pieces) == 1 and isinstance(pieces[0], Unknown):
        if not pieces[0].unset:
            return None
        decided_by[pieces[0].text.lstrip("$")] = (
            ""  # as `${NAME:-}`: nothing sets it, so it is taken as not set
        )
        return sign == "-z"
    text = _known(value, decided_by)
    return None if text is None else (not text) == (sign == "-z")


def _binary(node: Node, words: Words, decided_by: _DecidedBy) -> bool | None:
    operator = node.child_by_field_name("operator")
    sign = words.source.of(operator) if operator else ""
    left, right = node.children[0], node.children[-1]
    if sign in ("&&", "-a", "||", "-o"):
        first, last = decide(left, words, decided_by), decide(right, words, decided_by)
        return _both(first, last) if sign in ("&&", "-a") else _any(first, last)
    results = set()
    options = [alternatives(words.value(side, True)) for side in (left, right)]
    if len(options[0]) * len(options[1]) > MOST:
        return None
    for a in options[0]:
        for b in options[1]:
            results.add(
                _compare(
                    sign,
                    _known(a, decided_by),
                    _known(b, decided_by),
                    quoted=right.type in ("string", "raw_string"),
                )
            )
    return results.pop() if len(results) == 1 else None


def _compare(sign: str, left: str | None, right: str | None, quoted: bool) -> bool | None:
    if left is None or right is None:
        return None
    if sign in ("==", "=", "!="):
        same = left == right if quoted else fnmatch.fnmatchcase(left, right)
        return same == (sign != "!=")
    if sign == "=~" and re.fullmatch(r"[\w^$|()\[\].\-]{1,60}", right) and len(left) < 200:
        return bool(re.search(right, left)) if _is_pattern(right) else None
    if sign in _NUMBERS and all(re.fullmatch(r"\s*-?\d{1,18}\s*", text) for text in (left, right)):
        return _NUMBERS[sign](int(left), int(right))
    return None


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def matches(value: Value, patterns: list[str], decided_by: _DecidedBy) -> bool | None:
    """Whether the value of a `case` matches one of a branch's patterns."""
    found = {_known(choice, decided_by) for choice in alternatives(value)}
    if None in found:
        return True if "*" in patterns else None
    results = {
        any(fnmatch.fnmatchcase(str(text), pattern) for pattern in patterns) for text in found
    }
    return results.pop() if len(results) == 1 else None


def text_of(node: Node, words: Words) -> str:
    """A condition for people."""
    return " ".join(words.source.of(node).split())[:60]


def _known(value: Value, decided_by: _DecidedBy) -> str | None:
    text = literal(value)
    if text is not None:
        decided_by |= {
            piece.default: piece.text
            for piece in value
            if isinstance(piece, Text) and piece.default
        }
    return text


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _any(first: bool | None, last: bool | None) -> bool | None:
    return _not(_both(_not(first), _not(last)))


def _both(first: bool | None, last: bool | None) -> bool | None:
    if first is False or last is False:
        return False
    return None if first is None or last is None else True


def pattern(node: Node, words: Words) -> str:
    """A pattern of a `case`, without quotes."""
    return shown_value(words.value(node))
