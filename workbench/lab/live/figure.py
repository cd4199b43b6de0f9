"""A figure: one chart's declaration, its rows, and the words above it.

The declaration (Vega-Lite 5) names its data instead of holding it, so the same figure is drawn once
in a saved notebook and kept up to date in a live board.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.lab import palette
from workbench.lab.pictures.pictures import PictureError, render_svg

if TYPE_CHECKING:
    import altair as alt

DATA = "rows"
"""Name of the data in every declaration."""
VEGA_SCHEMA = "https://vega.github.io/schema/vega-lite/v5.6.1.json"
"""JupyterLab 4 draws Vega-Lite 5 and shows anything newer as text."""
VEGA_MIME = "application/vnd.vegalite.v5+json"
QUIET_EMBED = {"embedOptions": {"logLevel": 1}}
"""Vega's errors alone: a layer without rows (a limit that is far away, losses not evaluated yet) is
no error.
"""
AXIS_LETTER, TITLE_LETTER, SUBTITLE_LETTER = 5.6, 7.2, 6.1
"""Width in pixels of a letter of an axis, of a title of 13 pixels' height, of its subtitle."""
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


BLANK: dict[str, Any] = {
    "mark": {"type": "point", "opacity": 0},
    "data": {"values": [{}]},
    "height": 1,
    "view": {"stroke": None},
}
"""Chart under a title for want of rows: axes without data have no size."""


@dataclass(frozen=True)
class Figure:
    """One chart. `rows` are plain values; `title` carries the unit and `subtitle` the source of the
    numbers.
    """

    name: str
    title: str
    subtitle: str
    spec: dict[str, Any]
    rows: list[dict[str, Any]] = field(repr=False)
    wide: bool = False
    """Whether a board gives it a whole line."""
    empty: str = "No data yet."
    """What to show in place of an empty chart."""

    def static(self, width: int = 560, text: str | None = None) -> dict[str, Any]:
        """The chart with its data and title, for a saved notebook, a report or a file.

        `text` is the colour of titles and labels; None leaves it to the viewer's theme.
        """
        whole = width + self.names_width
        title = self.title_lines(whole, self.said)
        return {
            "$schema": VEGA_SCHEMA,
            "config": vega_config(text),
            "usermeta": QUIET_EMBED,
            "background": None,
            **(self.view(width) if self.rows else {"width": width, **BLANK}),
            "title": title,
        }

    def view(self, width: int) -> dict[str, Any]:
        """The chart with its data but neither schema nor configuration, to be placed in a larger
        one.
        """
        body = {k: v for k, v in self.spec.items() if k not in ("$schema", "config", "autosize")}
        return body | {"width": width, "data": {"values": self.rows}}

    def title_lines(self, width: int, subtitle: str) -> dict[str, str | list[str]]:
        """Title and `subtitle` in lines of at most `width` pixels: one line would widen the
        picture.
        """
        lines = {
            "text": textwrap.wrap(self.title, int(width / TITLE_LETTER)),
            "subtitle": textwrap.wrap(subtitle, int(width / SUBTITLE_LETTER)),
        }
        return {name: found if len(found) > 1 else "".join(found) for name, found in lines.items()}

    @property
    def said(self) -> str:
        """Line below the title."""
        return self.subtitle if self.rows else self.empty

    @property
    def names_width(self) -> int:
        """Pixels left of the plot: names of bars, or the numbers of an axis with its title."""
        layers = self.spec.get("layer", [self.spec])
        y: dict[str, Any] = next(
            (layer["encoding"]["y"] for layer in layers if "y" in layer.get("encoding", {})), {}
        )
        if y.get("type") != "nominal":
            return 60
        names = (str(row.get(y["field"], "")) for row in self.rows)
        return 20 + int(AXIS_LETTER * max(map(len, names), default=0))

    def svg(self, width: int = 560, text: str = palette.TEXT_COLOUR) -> str:
        """The chart as SVG text; needs no browser and no network.

        Args:
            width: Pixels of the plot.
            text: Colour of titles and labels.

        Raises:
            PictureError: It could not be drawn; the message says why.
        """
        return render_svg(self.static(width, text))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return mime_bundle(self.static(), f"{self.title} ({self.said})")


def vega_spec(chart: alt.TopLevelMixin, height: int) -> dict[str, Any]:
    """An altair chart as a Vega-Lite 5 declaration that is as wide as its container.

    Args:
        chart: A chart of the named data `DATA`.
        height: Pixels of the plot.
    """
    spec = without_named_data(chart.properties(width="container", height=height).to_dict())
    fit = {"type": "fit-x", "contains": "padding"}
    return {**spec, "data": {"name": DATA}, "$schema": VEGA_SCHEMA, "autosize": fit, "config": {}}


def without_named_data(spec: dict[str, Any]) -> dict[str, Any]:
    """The declaration with the named data stated nowhere, so that every layer takes it from the
    top.
    """
    layers = [without_named_data(layer) for layer in spec.get("layer", [])]
    inherited = {
        key: value for key, value in spec.items() if key != "data" or value != {"name": DATA}
    }
    return inherited | ({"layer": layers} if layers else {})


def mime_bundle(spec: dict[str, Any], text: str) -> dict[str, Any]:
    """Mime bundle of a declaration: Vega-Lite for JupyterLab, SVG for viewers without it, and text.

    Where no picture can be drawn, the text says why.
    """
    try:
        return {
            VEGA_MIME: spec,
            "image/svg+xml": render_svg({**spec, "config": vega_config(palette.TEXT_COLOUR)}),
            "text/plain": text,
        }
    except PictureError as error:
        return {VEGA_MIME: spec, "text/plain": f"{text}\nPicture left out: {error}"}


def vega_config(text: str | None = None) -> dict[str, Any]:
    """Vega configuration of snapshots: faint axes, and text in the colour `text`, or in that of the
    page's theme.
    """
    faint = "rgba(128,128,128,0.25)"
    words = {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal"}
    found: dict[str, Any] = {
        "font": FONT,
        "view": {"stroke": None},
        "axis": {"gridColor": faint, "domainColor": faint, "tickColor": faint, **words},
        "legend": {**words},
        "title": {
            "anchor": "start",
            "frame": "bounds",
            "fontSize": 13,
            "subtitlePadding": 4,
            "offset": 12,
        },
    }
    if text is not None:
        for part in ("axis", "legend"):
            found[part] |= {"labelColor": text, "titleColor": text}
        found["title"] |= {"color": text, "subtitleColor": text}
        found["text"] = {"color": text}
    return found
