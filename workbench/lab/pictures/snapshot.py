"""A view that stands still: all its charts as one picture, for a saved notebook."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from workbench.lab import palette
from workbench.lab.live.figure import DATA, QUIET, SCHEMA, Figure, bundle, config

WIDTH = 375
"""Pixels of a chart with all that belongs to it: two stand side by side in a notebook's cell on a
small screen.
"""
GAP = 20
LETTER = 5.6
"""Width of a letter of an axis; of a title, 7.2 of 13 pixels' height, 6.1 of a subtitle."""


def mimebundle(
    figures: Iterable[Figure], headline: str, lines: Sequence[str] = (), failed: bool = False
) -> dict[str, Any]:
    """Mime bundle of the charts that have rows, under a headline; drawn offline by JupyterLab 4."""
    drawn = [figure for figure in figures if figure.rows]
    text = "\n".join(
        [headline, *lines, *(f"  {figure.title} ({figure.subtitle})" for figure in drawn)]
    )
    return bundle(compose(drawn, headline, lines, failed), text) if drawn else {"text/plain": text}


def compose(
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
        title["color"] = palette.LIMIT
    return {
        "$schema": SCHEMA,
        "config": config(),
        "usermeta": QUIET,
        "background": None,
        "title": title,
        "datasets": {f"{DATA}_{figure.name}": figure.rows for figure in figures},
        "vconcat": [line(pair) for pair in pairs(figures)],
        "spacing": GAP,
    }


def pairs(figures: Sequence[Figure]) -> list[list[Figure]]:
    """Figures line by line; the order of the narrow ones stays, the wide ones come last."""
    narrow = [figure for figure in figures if not figure.wide]
    return [narrow[i : i + 2] for i in range(0, len(narrow), 2)] + [
        [figure] for figure in figures if figure.wide
    ]


def line(figures: Sequence[Figure]) -> dict[str, Any]:
    """One line of the picture."""
    return {
        "hconcat": [part(figure) for figure in figures],
        "spacing": GAP,
        "resolve": {"scale": {"color": "independent"}},
    }


def part(figure: Figure) -> dict[str, Any]:
    """One chart of the picture, its rows taken by name; titles are broken where they would be
    cut.
    """
    width = 2 * WIDTH + GAP if figure.wide else WIDTH
    title = {
        "text": textwrap.wrap(figure.title, int(width / 7.2)),
        "anchor": "start",
        "frame": "bounds",
        "subtitle": textwrap.wrap(figure.subtitle, int(width / 6.1)),
    }
    return figure.view(width - beside(figure)) | {
        "title": title,
        "data": {"name": f"{DATA}_{figure.name}"},
    }


def beside(figure: Figure) -> int:
    """Pixels left of a chart's bars: their names, or the numbers of an axis with its title."""
    layers = figure.spec.get("layer", [figure.spec])
    y: dict[str, Any] = next(
        (layer["encoding"]["y"] for layer in layers if "y" in layer.get("encoding", {})), {}
    )
    if y.get("type") != "nominal":
        return 60
    return 20 + int(
        LETTER * max((len(str(row.get(y["field"], ""))) for row in figure.rows), default=0)
    )
