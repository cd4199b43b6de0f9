"""The tables of a comparison, for a page, for a terminal and for machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from workbench.lab import rank_selection
from workbench.units import (
    byte_unit,
    bytes_text,
    count_text,
    digits,
    interval_text,
    loss_text,
    seconds_text,
)
from workbench.untrusted_text import escaped

TABLE_STYLE = """
<style>
.wb-table { border-collapse: collapse; margin: 4px 0 14px; font-size: 13px;
  font-variant-numeric: tabular-nums; }
.wb-table caption { text-align: left; font-weight: 600; padding: 6px 0; caption-side: top; }
.wb-table th, .wb-table td { padding: 4px 8px; text-align: right;
  border-bottom: 1px solid rgba(128,128,128,.25); }
.wb-table th { font-weight: 600; vertical-align: bottom; }
.wb-table td { white-space: nowrap; }
.wb-table .wb-name { text-align: left; white-space: normal; min-width: 5em; }
.wb-table .wb-id { text-align: left; white-space: normal; overflow-wrap: anywhere;
  min-width: 11em; }
</style>
"""

TableColumn = tuple[str, str, Callable[[Any], str]]
"""Column of the frame, its heading, and the text of a cell."""
Table = tuple[str, list[TableColumn], pd.DataFrame]
"""A table: its caption, its columns, its rows."""
TEXT_COLUMNS = ("plan", "source", "state", "run", "field", "value")
"""First words of the columns that hold text; the others hold numbers."""
UNFIT, NOT_RUN = "does not fit", "not run"
"""States of what no run has, as a row of the summary says them."""
TIMES = ("step_seconds", "step_seconds_90", "tokens_per_second")
"""Columns that a plan which does not fit has none of."""
BATCHES_DIFFER = "global batches differ: compare tokens/s, not step times"


def summary_table(summary: pd.DataFrame, by_tokens: bool = False) -> Table:
    """The summary, with intervals where one is known; nothing of the times of what does not fit.

    Args:
        summary: `Comparison.summary`.
        by_tokens: Whether step times of its rows cannot be compared.
    """
    if len(summary):
        unrun = ~summary["plan"].isin(summary["plan"][summary["source"] == "measured"])
        first = ~summary["plan"].duplicated()
        state = summary["state"].mask(summary["state"].isna() & unrun & first, NOT_RUN)
        unfit = (summary["state"] == UNFIT).astype(bool)
        times = {n: summary[n].astype(object).mask(unfit, None) for n in TIMES if n in summary}
        # A frame of numbers does not tell a loss that was not finite from none: steps do.
        of_run = {name: summary[name].astype(object) for name in ("first_loss", "last_loss")}
        lost = {name: loss.isna() & summary["steps"].notna() for name, loss in of_run.items()}
        losses = {name: loss.mask(lost[name], loss_text(None)) for name, loss in of_run.items()}
        summary = summary.assign(state=state, **times, **losses)
    columns = [
        column
        for column in summary_columns()
        if column[0] not in ("step_seconds_90", "skipped_steps")
        or (column[0] in summary and summary[column[0]].fillna(0).astype(bool).any())
    ]
    words = [BATCHES_DIFFER] if by_tokens else []
    if len(summary) and (summary["steps"].fillna(0) > 1).any():
        words.append("measured step times: median of the run's steps")
    return " · ".join(["Plans and runs compared", *words]), columns, summary


def differences_table(differences: dict[str, dict[str, Any]]) -> Table:
    """The fields in which plans differ, a column a plan."""
    names = list(next(iter(differences.values()), {}))
    columns: list[TableColumn] = [("field", "field", str)]
    columns += [(f"value {number}", name, str) for number, name in enumerate(names)]
    rows = [[field, *map(plain_value, values.values())] for field, values in differences.items()]
    return (
        "Plan fields that differ",
        columns,
        pd.DataFrame(rows, columns=[column for column, _, _ in columns]),
    )


def plain_value(value: Any) -> str:
    """A field's value as a plan file spells it."""
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def memory_table(frame: pd.DataFrame) -> Table:
    """Caption, columns and rows of the memory table: of many ranks the eight largest, the
    median and the smallest.
    """
    columns, unit = memory_columns(frame)
    caption = f"Peak memory by rank ({unit})"
    shown = (
        pd.concat([extreme_rows(rows) for _, rows in frame.groupby("plan", sort=False)])
        if len(frame)
        else frame
    )
    if len(shown) < len(frame):
        caption += (
            f"; {len(shown)} of {len(frame)} rows: the largest, the median and the smallest "
            f"of each plan"
        )
    return caption, columns, shown


def extreme_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of one plan that are shown."""
    if len(rows) <= rank_selection.MAX_RANKS_SHOWN:
        return rows
    complete = [
        column
        for column in rows.columns
        if column.endswith("_bytes") and rows[column].notna().all()
    ]
    chosen = (
        rank_selection.extreme_ranks(dict(zip(rows["rank"], rows[complete[-1]])))
        if complete
        else rows["rank"][: rank_selection.MAX_RANKS_SHOWN]
    )
    return rows[rows["rank"].isin(chosen)]


def summary_columns() -> list[TableColumn]:
    """Columns of the summary."""
    return [
        ("plan", "plan", str),
        ("source", "source", str),
        ("ranks", "ranks", integer_or_dash),
        ("peak_bytes", "peak memory (max rank)", or_dash(bytes_text)),
        ("step_seconds", "step time", or_dash(seconds_text)),
        ("step_seconds_90", "90 % interval", or_dash(interval_text)),
        ("tokens_per_second", "tokens/s", or_dash(count_text)),
        ("steps", "steps", integer_or_dash),
        ("state", "state", or_dash(str)),
        ("skipped_steps", "skipped", integer_or_dash),
        ("first_loss", "first loss", or_dash(_loss)),
        ("last_loss", "last loss", or_dash(_loss)),
    ]


def _loss(value: float | str) -> str:
    return value if isinstance(value, str) else loss_text(value, places=3)


def memory_columns(frame: pd.DataFrame) -> tuple[list[TableColumn], str]:
    """Columns of the memory table, and the one unit of its bytes."""
    found = [column for column in frame.columns if column.endswith("_bytes")]
    found = [column for column in found if not _repeats(frame, column)]
    unit, size = byte_unit(float(v) for column in found for v in frame[column].dropna())
    amount = or_dash(lambda value: digits(value / size, 4))
    columns: list[TableColumn] = [("plan", "plan", str), ("rank", "rank", integer_or_dash)]
    columns += [(name, name.removesuffix("_bytes").replace("_", ", "), amount) for name in found]
    columns += [
        (f"{s}_error", f"{s} − measured", or_dash("{:+.2%}".format))
        for s in ("estimated", "rehearsed")
    ]
    return [
        *columns,
        ("run", "measured in run", or_dash(str)),
        ("step", "at step", integer_or_dash),
    ], unit


def _repeats(frame: pd.DataFrame, column: str) -> bool:
    """Whether a column of allocated memory says nothing new: only GPUs hold more than that."""
    whole = column.replace("_allocated_", "_")
    return whole != column and bool(frame[column].equals(frame[whole]))


def html_table(caption: str, columns: list[TableColumn], frame: pd.DataFrame) -> str:
    """A frame as an HTML table; names are given once while they repeat."""
    head = "".join(
        f'<th scope="col"{_side(name)}>{escaped(title)}</th>' for name, title, _ in columns
    )
    body = "".join(
        f"<tr>{''.join(f'<td{_side(name)}>{escaped(text)}</td>' for name, text in row)}</tr>"
        for row in text_rows(columns, frame)
    )
    return (
        f"{TABLE_STYLE}<table "
        f'class="wb-table"><caption>{escaped(caption)}</caption><tr>{head}</tr>{body}</table>'
    )


def text_table(caption: str, columns: list[TableColumn], frame: pd.DataFrame) -> str:
    """A frame as aligned lines of text."""
    lines = [
        [title for _, title, _ in columns],
        *([text for _, text in row] for row in text_rows(columns, frame)),
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    sides = [str.ljust if is_text_column(name) else str.rjust for name, _, _ in columns]
    aligned = [
        "  ".join(side(text, width) for side, text, width in zip(sides, line, widths)).rstrip()
        for line in lines
    ]
    return "\n".join([caption, *aligned])


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as plain data; what is not known is None."""
    return [{str(k): _plain(v) for k, v in row.items()} for row in frame.to_dict("records")]


def or_dash(say: Callable[[Any], str]) -> Callable[[Any], str]:
    """`say`, with a dash for what is not known."""
    return lambda value: "–" if value is None or value != value else say(value)


def integer_or_dash(value: Any) -> str:
    """A whole number, or a dash."""
    return "–" if value is None or value != value else str(int(value))


def text_rows(columns: list[TableColumn], frame: pd.DataFrame) -> Iterable[list[tuple[str, str]]]:
    """Each row as (column, text); a plan's name is given once while it repeats."""
    before: Any = object()
    for row in frame.to_dict("records"):
        cells = [(name, say(row.get(name))) for name, _, say in columns]
        repeated = row.get("plan") == before
        before = row.get("plan")
        yield [(name, "" if name == "plan" and repeated else text) for name, text in cells]


def is_text_column(name: str) -> bool:
    """Whether a column holds text."""
    return name.split()[0] in TEXT_COLUMNS


def _side(name: str) -> str:
    return f' class="wb-{"id" if name == "run" else "name"}"' if is_text_column(name) else ""


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if value != value else value
