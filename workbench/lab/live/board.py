"""The board: one widget that hosts every chart of a view, and keeps them up to date by deltas."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from workbench.lab.live.figure import Figure

HERE = Path(__file__).parent


class Board(anywidget.AnyWidget):
    """Charts under a banner. State is what the page must have at once; rows are sent, and sent
    again on request.

    Safe to call from any one thread at a time besides the kernel's own.
    """

    _esm = HERE / "static" / "dashboard.js"
    _css = HERE / "js" / "board.css"

    figures: Any = traitlets.List().tag(sync=True)
    """Name, title, subtitle, declaration of every chart, in order."""
    banner: Any = traitlets.Dict().tag(sync=True)
    """Tone, headline, lines, fraction, buttons, code, reconnect."""

    def __init__(self, on_press: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._number = 0
        self._lock = threading.RLock()
        self._on_press = on_press
        self._revealing = False
        """True where a page that shows this board is to scroll to it."""
        self.on_msg(self._receive)

    def put(self, *figures: Figure) -> None:
        """Show these figures with all their rows, in place of those of the same name or after the
        others.
        """
        with self._lock:
            declared = {figure["name"]: figure for figure in self.figures} | {
                f.name: _declaration(f) for f in figures
            }
            if list(declared.values()) != self.figures:
                self.figures = list(declared.values())
            self._rows |= {figure.name: _clean(figure.rows) for figure in figures}
            self._send_rows({figure.name: _change(self._rows[figure.name]) for figure in figures})

    def remove(self, *names: str) -> None:
        """Take charts away; names that are not there are fine."""
        with self._lock:
            if any(figure["name"] in names for figure in self.figures):
                self.figures = [figure for figure in self.figures if figure["name"] not in names]
            self._rows = {name: rows for name, rows in self._rows.items() if name not in names}

    def extend(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Add rows to a chart; those marked `open` take the place of those marked so before."""
        with self._lock:
            added, stored = _clean(rows), self._rows[name]
            if any(row.get("open") for row in added):
                stored = [row for row in stored if not row.get("open")]
            self._rows[name] = stored + added
            self._send_rows({name: {"rows": added, "append": True}})

    def rows(self, name: str) -> list[dict[str, Any]]:
        """What a chart shows now."""
        return list(self._rows.get(name, []))

    def show_banner(self, **banner: Any) -> None:
        """Replace the banner: tone (calm|busy|good|bad), headline, lines, fraction, buttons, code.

        `reconnect` is what the page says where the kernel is gone while the banner offers buttons.
        """
        self.banner = banner | {"turn": self.banner.get("turn", 0)}

    def reveal(self) -> None:
        """Scroll the page to this board, at once or as soon as a page shows it."""
        self._revealing = True
        self.send({"type": "reveal"})

    def _send_rows(self, charts: dict[str, Any]) -> None:
        if charts:
            self._number += 1
            self.send({"type": "rows", "number": self._number, "charts": charts})

    def _receive(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        if content.get("type") == "hello":
            with self._lock:
                self._send_rows({name: _change(rows) for name, rows in self._rows.items()})
            if self._revealing:
                self.send({"type": "reveal"})
        elif content.get("type") == "revealed":
            self._revealing = False
        elif content.get("type") == "press" and self._on_press:
            self._on_press(str(content.get("action")))
            self.banner = self.banner | {"turn": self.banner.get("turn", 0) + 1}


def _declaration(figure: Figure) -> dict[str, Any]:
    cells = {"name": figure.name, "title": figure.title, "subtitle": figure.subtitle}
    return cells | {"wide": figure.wide, "empty": figure.empty, "spec": figure.spec}


def _change(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"rows": rows, "append": False}


def _clean(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plain Python values: NumPy scalars are not JSON, and neither is not-a-number."""
    return [{key: _plain(value) for key, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and value != value else value
