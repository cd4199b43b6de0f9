"""The terminal: the one place where text becomes a line or a cell on it.

Names, causes of failures and log lines come from other people's files. They are shown as they are:
never read as markup (a gloo error begins with "[/"), and without the characters that a terminal
acts on (`untrusted_text.visible`).
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import StyleType
from rich.table import Column, Table
from rich.text import Text

from workbench.cli.column_widths import Need, fit, need, shortened_text
from workbench.untrusted_text import visible

PIPE_WIDTH = 184
"""Columns of a table that no terminal shows, where COLUMNS says nothing."""


def _room(width: int, columns: int) -> int:
    """Of a screen's `width`, what so many columns have for themselves: three go between two, and
    one at each end.
    """
    return width - (3 * columns - 1)


class Grid(Table):
    """A table whose title, headings and cells are text and nothing else.

    Lines break at spaces. Where that is too wide for the screen columns without a figure and then
    the `optional` ones are left out, in their order and with a line that names them; then figures
    are parted from their units; then long words lose their middle.
    """

    def __init__(self, title: str = "", optional: Iterable[str] = ()) -> None:
        super().__init__(title=as_text(title, "table.title"))
        self.optional = tuple(optional)

    def add_row(
        self, *cells: object, style: StyleType | None = None, end_section: bool = False
    ) -> None:
        """Add a row; each cell as it reads."""
        super().add_row(*(_flat(cell) for cell in cells), style=style, end_section=end_section)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title, what fits of the table, and what did not."""
        width, needs = options.max_width, [_need(column) for column in self.columns]
        kept, left_out = self._kept(needs, width)
        widths = fit([needs[index] for index in kept], _room(width, len(kept)))
        yield Text(shortened_text(str(self.title), width), style="table.title")
        yield self._fitted([self.columns[index] for index in kept], widths)
        if left_out:
            left_out_line = f"left out at {width} columns: {', '.join(left_out)}\n"
            yield Text(shortened_text(left_out_line, width), style="table.caption")

    def _kept(self, needs: Sequence[Need], width: int) -> tuple[list[int], list[str]]:
        """(the columns that stay, the headings of the others)."""
        headings = [str(column.header) for column in self.columns]
        kept, left_out = list(range(len(headings))), []
        empty = [str(c.header) for c in self.columns if {str(cell) for cell in c.cells} == {"–"}]
        for name in dict.fromkeys([*empty, *(name for name in self.optional if name in headings)]):
            if sum(needs[index].fair for index in kept) <= _room(width, len(kept)):
                break
            kept.remove(headings.index(name))
            left_out.append(name)
        return kept, left_out

    def _fitted(self, columns: list[Column], widths: list[int]) -> Table:
        """These columns in these widths."""
        built = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column, width in zip(columns, widths):
            heading = as_text(shortened_text(str(column.header), width))
            built.add_column(heading, justify=column.justify, overflow="fold", width=width)
        for row, *cells in zip(self.rows, *(column.cells for column in columns)):
            cells_of_row = (
                as_text(shortened_text(str(cell), width)) for cell, width in zip(cells, widths)
            )
            built.add_row(*cells_of_row, style=row.style, end_section=row.end_section)
        return built


def _flat(cell: object) -> Text:
    text = as_text(cell)
    text.expand_tabs(8)
    return text


def _need(column: Column) -> Need:
    return need(map(str, column.cells), str(column.header), figures=column.justify == "right")


def as_text(value: object, style: str = "") -> Text:
    """`value` as it reads, in one style."""
    return Text(visible(value.plain if isinstance(value, Text) else str(value)), style=style)


def console(stderr: bool = False) -> Console:
    """A console as wide as the terminal; without one as COLUMNS says, else wide enough for a
    table.
    """
    stream = sys.stderr if stderr else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    width = None if stream.isatty() or (columns.isdecimal() and int(columns)) else PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def print_words(screen: Console, words: str, style: str = "") -> None:
    """Lines of words, on a terminal broken at spaces as it is wide, elsewhere as they are."""
    text = as_text(words, style)
    if screen.is_terminal:
        text.plain = "\n".join(_broken(line, screen.width) for line in text.plain.split("\n"))
    screen.print(text, soft_wrap=True)


def _broken(line: str, width: int) -> str:
    """A line on several, below its own indent; a path that is longer stays whole."""
    indent = line[: len(line) - len(line.lstrip())]
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = indent
    lines = wrapper.wrap(line)
    return "\n".join(lines) if cell_len(line) > width else line


def print_message(message: str, style: str = "") -> None:
    """One message on stderr."""
    print_words(console(stderr=True), message, style)
