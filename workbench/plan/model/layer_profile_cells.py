"""Cells of a layer profile's file: read, or a problem that names the row and the column."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from workbench.errors import Problem
from workbench.untrusted_text import shown, visible

Row = Mapping[str, str | None]
Rows = Sequence[tuple[int, Row]]
"""(line of the file, its cells by column)."""
MOST = 1e18
"""Of a figure, so that sums stay finite."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
"""Unlike `float`, without 1_000."""


def figure(line: int, row: Row, column: str, problems: list[Problem]) -> float:
    """The number in a cell; 0 with a problem where it is none, so that all are found at once."""
    where, text = f"row {line}, {column}", (row.get(column) or "").strip()
    if not NUMBER.fullmatch(text):
        said = f"is {shown(text)}" if text else "is missing"
        problems.append(Problem(where, f"{said}; legal: a number from 0"))
        return 0.0
    value = float(text)
    if not 0 <= value <= MOST:
        problems.append(Problem(where, f"is {shown(text)}; legal: a number from 0 to {MOST:g}"))
        return 0.0
    return value


def whole_number(line: int, row: Row, column: str, least: int, problems: list[Problem]) -> int:
    """As `figure`, of a number without decimals."""
    text, found = (row.get(column) or "").strip(), list[Problem]()
    value = figure(line, row, column, found)
    if found or value < least or value != int(value):
        said = f"is {shown(text)}" if text else "is missing"
        problems.append(
            Problem(f"row {line}, {column}", f"{said}; legal: a whole number from {least}")
        )
        return least
    return int(value)


def sizes_of_nodes(
    line: int, row: Row, column: str, problems: list[Problem]
) -> tuple[tuple[str, float], ...]:
    """(node, bytes) of each NODE:BYTES in a cell; of a node of several the sum."""
    found: dict[str, float] = {}
    for word in (row.get(column) or "").split():
        node, _, text = word.rpartition(":")
        if not node or not NUMBER.fullmatch(text) or not 0 <= float(text) <= MOST:
            legal = f"NODE:BYTES, bytes from 0 to {MOST:g}"
            problems.append(Problem(f"row {line}, {column}", f"is {shown(word)}; legal: {legal}"))
        else:
            found[node] = found.get(node, 0.0) + float(text)
    return tuple(found.items())


def same_number(rows: Rows, column: str, problems: list[Problem]) -> int:
    """The whole number from 1 that a column has on every row."""
    before = len(problems)
    values = [whole_number(line, row, column, 1, problems) for line, row in rows]
    if len(problems) == before:
        problems += different(rows, column, values)
    return values[0]


def same_word(rows: Rows, column: str, problems: list[Problem]) -> str:
    """What a column says on every row; empty where the file lacks it."""
    words = [row.get(column) or "" for _, row in rows]
    problems += different(rows, column, words)
    return words[0]


def different(rows: Rows, column: str, values: Sequence[object]) -> Iterable[Problem]:
    """A problem of each row whose value is not the first's."""
    first = rows[0][0]
    for (line, row), value in zip(rows, values):
        if value != values[0]:
            yield Problem(
                f"row {line}, {column}",
                f"is {shown(row.get(column) or '')}, but {shown(rows[0][1].get(column) or '')} in "
                f"row {first}; legal: the same in every row",
            )


def names(line: int, row: Row, problems: list[Problem]) -> tuple[str, str]:
    """(node, layer) of a row."""
    for column in ("model", "node", "layer"):
        text = row[column] or ""
        if text != visible(text):
            problems.append(
                Problem(
                    f"row {line}, {column}",
                    f"is {shown(text)}, which has characters that are not shown; legal: plain text",
                )
            )
    node = row["node"] or ""
    if len(node.split()) != 1:
        said = f"is {shown(node)}" if node else "is missing"
        problems.append(Problem(f"row {line}, node", f"{said}; legal: a name without spaces"))
    return node, row["layer"] or ""
