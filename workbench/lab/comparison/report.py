"""A report: one page that holds a whole comparison and opens anywhere, without a network and
without scripts.

Charts are drawn here, as SVG: such a page prints, is searchable, and reads in ten years.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from workbench.lab.comparison import comparison_tables
from workbench.lab.comparison.entries import ComparisonEntry
from workbench.lab.live.figure import FONT, Figure
from workbench.lab.pictures.pictures import PictureError
from workbench.safe_io.files import replace_file
from workbench.untrusted_text import escaped

HALF_WIDTH, FULL_WIDTH = 515, 1060
"""Pixels of a chart that shares its line with another, and of one that has a line of its own, with
all that belongs to it: a wider picture would be shrunk, with its text.
"""
SOURCE_MEANINGS = (
    "Estimated: closed form. Rehearsed: the real code on fake tensors. Measured: the allocator's "
    "own count and the clock of real ranks, on the run and step named."
)
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 14px/1.5 {font}; color: #222; background: #fff;
  max-width: 1120px; margin: 24px auto; padding: 0 20px; }}
h1 {{ font-size: 22px; margin-bottom: 2px; }} h2 {{ font-size: 16px; margin: 30px 0 6px; }}
.quiet {{ color: #666; }}
.charts {{ display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 22px;
  align-items: start; }}
.charts > .wide {{ grid-column: 1 / -1; }}
.charts svg {{ max-width: 100%; height: auto; }}
.scroll {{ overflow-x: auto; }}
figure {{ margin: 0; }}
pre {{ background: #f6f6f6; padding: 10px 12px; font-size: 12px; overflow-x: auto; }}
@media (max-width: 800px) {{ .charts {{ grid-template-columns: minmax(0, 1fr); }} }}
@media print {{ body {{ margin: 0; max-width: none; }} figure {{ break-inside: avoid; }} }}
</style></head><body>
<h1>{title}</h1>
<p class="quiet">{words}</p>
{body}
</body></html>
"""


def write_report(
    path: str | Path,
    entries: Sequence[ComparisonEntry],
    tables: Sequence[comparison_tables.Table],
    figures: Sequence[Figure],
) -> list[str]:
    """Write one HTML page, complete or not at all.

    Returns:
        The charts that could not be drawn, each with the reason; the page lists them too.
    """
    charts, left_out = draw_figures(figures)
    sections = [
        *(f'<div class="scroll">{comparison_tables.html_table(*table)}</div>' for table in tables),
        f'<h2>Charts</h2>{left_out_list(left_out)}<div class="charts">{"".join(charts)}</div>',
        plan_files(entries),
    ]
    names = [entry.name for entry in entries]
    words = (
        f"{len(names)} compared: {', '.join(names)}. Written "
        f"{time.strftime('%Y-%m-%d %H:%M %Z')}. {SOURCE_MEANINGS}"
    )
    page = PAGE.format(
        title="Strategies compared", font=FONT, words=escaped(words), body="\n".join(sections)
    )
    replace_file(path, page)
    return left_out


def draw_figures(figures: Sequence[Figure]) -> tuple[list[str], list[str]]:
    """(the charts as HTML, titles of those that could not be drawn, each with the reason)."""
    charts: list[str] = []
    left_out: list[str] = []
    for figure in figures:
        try:
            width = FULL_WIDTH if figure.wide else HALF_WIDTH
            picture = figure.svg(width - figure.names_width)
            charts.append(f'<figure class="{"wide" if figure.wide else ""}">{picture}</figure>')
        except PictureError as error:
            left_out.append(f"{figure.title}: {error}")
    return charts, left_out


def left_out_list(left_out: Sequence[str]) -> str:
    """The charts that are missing from the page, as HTML; empty where none is."""
    if not left_out:
        return ""
    items = "".join(f"<li>{escaped(words)}</li>" for words in left_out)
    return f"<p>Charts left out:</p><ul>{items}</ul>"


def plan_files(entries: Sequence[ComparisonEntry]) -> str:
    """The plan files as HTML, of the entries whose plan is known."""
    sections = [
        f"<h3>{escaped(entry.name)}</h3><pre>{escaped(entry.plan.to_yaml())}</pre>"
        for entry in entries
        if entry.plan
    ]
    return "<h2>Plan files</h2>" + "".join(sections) if sections else ""
