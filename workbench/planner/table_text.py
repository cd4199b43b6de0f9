"""Tables of the planner's answers as lines of text and as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workbench.untrusted_text import escaped


def aligned_lines(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Rows as lines of text, columns two spaces apart.

    Args:
        rows: Cells; the heads are a row.
        left: Column that is aligned left, the others are aligned right. The last column gets no
            trailing spaces.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(_padded(row, widths, left)) for row in rows]


def _padded(row: Sequence[str], widths: Sequence[int], left: int) -> Iterable[str]:
    last = len(row) - 1
    for i, (cell, width) in enumerate(zip(row, widths)):
        if i != left:
            yield cell.rjust(width)
        else:
            yield cell if i == last else cell.ljust(width)


def captioned_html_table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table under its caption, as HTML; all text is escaped."""
    head = "".join(f"<th>{escaped(name)}</th>" for name in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><caption>{escaped(caption)}</caption><tr>{head}</tr>{body}</table>"
