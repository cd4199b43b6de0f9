"""A report: one page that holds a whole comparison and opens anywhere, without a network and
without scripts.

Charts are drawn here, as SVG: such a page prints, is searchable, and reads in ten years.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.lab.comparison import comparison_tables
from workbench.lab.comparison.compare import Comparison, compare
from workbench.lab.live.figure import FONT, Figure
from workbench.lab.pictures.pictures import PictureError
from workbench.safe_io.files import replace_file
from workbench.untrusted_text import escaped

WIDTH, WIDE = 440, 940
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 14px/1.5 {font}; color: #222; background: #fff; max-width: 1120px; margin: 24px auto; padding: 0 20px; }}
h1 {{ font-size: 22px; margin-bottom: 2px; }} h2 {{ font-size: 16px; margin: 30px 0 6px; }}
.quiet {{ color: #666; }}
.charts {{ display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 22px; align-items: start; }}
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


def report(profiles: Sequence[Any] | Comparison, path: str | Path) -> Path:
    """Write one HTML page of a comparison, or of what `compare` would put side by side; its
    path.
    """
    return write(profiles if isinstance(profiles, Comparison) else compare(*profiles), path)


def write(comparison: Comparison, path: str | Path) -> Path:
    """Write a comparison as one HTML page, whole or not at all; its path."""
    replace_file(path, page(comparison))
    return Path(path)


def page(comparison: Comparison) -> str:
    """The page."""
    names = [entry.name for entry in comparison.entries]
    charts, comparison.left_out = drawn(comparison.figures())
    sections = [
        *(
            f'<div class="scroll">{comparison_tables.page_table(*sheet)}</div>'
            for sheet in comparison.sheets
        ),
        f'<h2>Charts</h2>{lost(comparison.left_out)}<div class="charts">{"".join(charts)}</div>',
        plans(comparison),
    ]
    words = (
        f"{len(names)} compared: {', '.join(names)}. Written "
        f"{time.strftime('%Y-%m-%d %H:%M %Z')}. {MEANING}"
    )
    return PAGE.format(
        title="Strategies compared", font=FONT, words=escaped(words), body="\n".join(sections)
    )


MEANING = (
    "Estimated: closed form. Rehearsed: the real code on fake tensors. Measured: the allocator's "
    "own count and the "
    "clock of real ranks, on the run and step named."
)


def drawn(figures: Sequence[Figure]) -> tuple[list[str], list[str]]:
    """(the charts of the page, which could not be drawn and why)."""
    charts: list[str] = []
    left_out: list[str] = []
    for figure in figures:
        try:
            picture = figure.svg(WIDE if figure.wide else WIDTH)
            charts.append(f'<figure class="{"wide" if figure.wide else ""}">{picture}</figure>')
        except PictureError as error:
            left_out.append(f"{figure.title}: {error}")
    return charts, left_out


def lost(left_out: Sequence[str]) -> str:
    """Charts that are missing from the page, in words; nothing where none is."""
    if not left_out:
        return ""
    return (
        f"<p>Charts left out:</p><ul>{''.join(f'<li>{escaped(one)}</li>' for one in left_out)}</ul>"
    )


def plans(comparison: Comparison) -> str:
    """The plan files, where they are known."""
    told = [
        f"<h3>{escaped(entry.name)}</h3><pre>{escaped(entry.plan.to_yaml())}</pre>"
        for entry in comparison.entries
        if entry.plan
    ]
    return "<h2>Plan files</h2>" + "".join(told) if told else ""
