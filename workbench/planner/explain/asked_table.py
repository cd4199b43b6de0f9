"""A table of an explanation that is made only where it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.planner.table_text import aligned_lines, captioned_html_table
from workbench.untrusted_text import escaped


@dataclass(frozen=True, repr=False)
class AskedTable:
    """The table, as cells for people and as data for machines.

    Attributes:
        key: Of the data in JSON.
        title: With the source of the figures.
        heads: Names of the columns.
        rows: Cells.
        notes: What is to be said below, a line each.
        data: The rows as plain data.
        optional: Columns that a narrow terminal does without, first to go first.
    """

    key: str
    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: Sequence[str]
    data: Sequence[dict[str, Any]]
    optional: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return "\n".join(
            [self.title, *aligned_lines([self.heads, *self.rows], left=0), *self.notes]
        )

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escaped(line)}</p>" for line in self.notes)
        return captioned_html_table(self.title, self.heads, self.rows) + notes
