"""A view that stands still: all its charts as one picture, for a saved notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from workbench.lab import palette
from workbench.lab.live.figure import (
    DATA,
    QUIET_EMBED,
    VEGA_SCHEMA,
    Figure,
    mime_bundle,
    vega_config,
)

NARROW_CHART_WIDTH = 375
"""Pixels of a chart with all that belongs to it: two stand side by side in a notebook's cell on a
small screen.
"""
CHART_GAP = 20


def snapshot_bundle(
    figures: Iterable[Figure], headline: str, lines: Sequence[str] = (), failed: bool = False
) -> dict[str, Any]:
    """Mime bundle of the charts that have rows, under a headline; drawn offline by JupyterLab 4."""
    drawn = [figure for figure in figures if figure.rows]
    text = "\n".join(
        [headline, *lines, *(f"  {figure.title} ({figure.subtitle})" for figure in drawn)]
    )
    return (
        mime_bundle(snapshot_spec(drawn, headline, lines, failed), text)
        if drawn
        else {"text/plain": text}
    )


def snapshot_spec(
    figures: Sequence[Figure], headline: str, lines: Sequence[str], failed: bool = False
) -> dict[str, Any]:
    """One declaration of all charts, two a line and the wide ones alone."""
    title: dict[str, Any] = {
        "text": headline,
        "subtitle": list(lines),
        "fontSize": 15,
        "offset": 14,
        "anchor": "start",
    }
    if failed:
        title["color"] = palette.LIMIT_COLOUR
    return {
        "$schema": VEGA_SCHEMA,
        "config": vega_config(),
        "usermeta": QUIET_EMBED,
        "background": None,
        "title": title,
        "datasets": {f"{DATA}_{figure.name}": figure.rows for figure in figures},
        "vconcat": [figure_line(pair) for pair in figure_lines(figures)],
        "spacing": CHART_GAP,
    }


def figure_lines(figures: Sequence[Figure]) -> list[list[Figure]]:
    """Figures line by line; the order of the narrow ones stays, the wide ones come last."""
    narrow = [figure for figure in figures if not figure.wide]
    return [narrow[i : i + 2] for i in range(0, len(narrow), 2)] + [
        [figure] for figure in figures if figure.wide
    ]


def figure_line(figures: Sequence[Figure]) -> dict[str, Any]:
    """One line of the picture."""
    return {
        "hconcat": [figure_part(figure) for figure in figures],
        "spacing": CHART_GAP,
        "resolve": {"scale": {"color": "independent"}},
    }


def figure_part(figure: Figure) -> dict[str, Any]:
    """One chart of the picture, its rows taken by name; titles are broken where they would be
    cut.
    """
    width = 2 * NARROW_CHART_WIDTH + CHART_GAP if figure.wide else NARROW_CHART_WIDTH
    title = figure.title_lines(width, figure.subtitle) | {"anchor": "start", "frame": "bounds"}
    return figure.view(width - figure.names_width) | {
        "title": title,
        "data": {"name": f"{DATA}_{figure.name}"},
    }
