"""Parse a shell script with tree-sitter-bash; what its grammar lacks or splits wrongly is rewritten
before.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from workbench.errors import refuse
from workbench.interop.shell.words import Source

if TYPE_CHECKING:
    from tree_sitter import Node, Parser, Tree

_SLICE = re.compile(rb"\$\{(\w+:(?![-=+?])\s*\$?\{?[\w +*/$-]+\}?)\}")
"""`${NAME:FROM:COUNT}`, which the grammar lacks and nothing here knows: read as a variable that
nothing sets.
"""
_BLANK = re.compile(rb"(?<!<)<[A-Z][\w ./,:-]*\w>(?!>)(?=[\s\"'/_]|$)")
"""`<PATH TO X>`, which people are to fill in: a word and no redirection."""


def parse_script(data: bytes, line: Callable[[int], int]) -> tuple[Node, Source]:
    """(root of the tree, its text); `line` says the line of the file of each byte.

    Raises `PlanError` naming the line where the text is no script.
    """
    data = _SLICE.sub(lambda m: b"${" + re.sub(rb"\W", b"_", m[1]) + b"}", data)
    data = _BLANK.sub(
        lambda m: re.sub(rb"[\s<>]", lambda c: b"_" if c[0].isspace() else b"%", m[0]), data
    )
    tree, data, line = _mended(data, line)
    source = Source(data, line)
    if (bad := _error(tree.root_node)) is not None:
        near = " ".join(source.of(bad).split())[:40]
        found = f"line {line(bad.start_byte)} cannot be read" + f", near {near!r}" * bool(near)
        raise refuse("file", f"is no shell script: {found}")
    return tree.root_node, source


@functools.cache
def _bash_parser() -> Parser:
    """Imported when a script is read: ranks, and machines that only run, do without."""
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


def _mended(data: bytes, line: Callable[[int], int]) -> tuple[Tree, bytes, Callable[[int], int]]:
    """(tree, text, line of each byte), with `$NAME` as `${NAME}` where the grammar tears it
    (`$A/$B/c`).
    """
    for _ in range(8):
        tree = _bash_parser().parse(data)
        torn = [at for at in _torn(tree.root_node) if re.match(rb"\w", data[at + 1 : at + 2])]
        if not torn:
            break
        parts, ends, last = [], [], 0
        for at in torn:
            name = re.match(rb"\d|\w+", data[at + 1 :])
            end = at + 1 + (len(name[0]) if name else 0)
            parts += [data[last:at], b"${", data[at + 1 : end], b"}"]
            ends.append(end)
            last = end
        line = functools.partial(
            _shifted, line, [end + 2 * k for k, end in enumerate(ends, start=1)]
        )
        data = b"".join([*parts, data[last:]])
    return tree, data, line


def _shifted(line: Callable[[int], int], marks: Sequence[int], byte: int) -> int:
    return line(byte - 2 * bisect.bisect_right(marks, byte))


def _torn(node: Node) -> list[int]:
    found = [
        child for child in node.children[-1:] if child.type == "$" and node.type == "concatenation"
    ]
    return [child.start_byte for child in found] + [
        at for child in node.children for at in _torn(child)
    ]


def _error(node: Node) -> Node | None:
    """The first place where the grammar does not hold."""
    if node.type in ("expansion", "command_substitution"):
        return None  # its value is unknown, whatever it says
    if node.type == "ERROR" or node.is_missing:
        return node
    if not node.has_error:
        return None
    return next((found for child in node.children if (found := _error(child)) is not None), None)
