"""Arithmetic of the shell, `$((A * 2))`, on numbers that are known."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node

Lookup = Callable[["Node"], str | None]
"""The text of a node that is no operator; None where it is not known."""

BOUND = 2**63


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_BINARY: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _quotient,
    "%": lambda a, b: a - b * _quotient(a, b),
    "**": lambda a, b: a**b if 0 <= b < 64 else 0,
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    ">": lambda a, b: int(a > b),
    "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b),
    "&&": lambda a, b: int(bool(a and b)),
    "||": lambda a, b: int(bool(a or b)),
}


def evaluate(node: Node, lookup: Lookup) -> int | None:
    """The integer of an arithmetic expression; None where something in it is not known or is no
    number.
    """
    if node.type in ("arithmetic_expansion", "parenthesized_expression"):
        inner = node.named_children
        return evaluate(inner[0], lookup) if len(inner) == 1 else None
    if node.type == "binary_expression":
        return _binary(node, lookup)
    if node.type == "unary_expression":
        sign, value = node.children[0].type, evaluate(node.children[-1], lookup)
        return None if value is None else {"-": -value, "+": value, "!": int(not value)}.get(sign)
    if node.type == "ternary_expression":
        test, yes, no = (evaluate(child, lookup) for child in node.named_children[:3])
        return None if test is None else yes if test else no
    text = lookup(node)
    return int(text) if text is not None and re.fullmatch(r"\s*-?\d{1,18}\s*", text) else None


def _binary(node: Node, lookup: Lookup) -> int | None:
    sign = node.child_by_field_name("operator")
    left, right = (evaluate(child, lookup) for child in (node.children[0], node.children[-1]))
    apply = _BINARY.get(sign.type if sign else "")
    if left is None or right is None or apply is None or (sign and sign.type in "/%" and not right):
        return None
    found = apply(left, right)
    return found if abs(found) < BOUND else None
