"""The picture of a live view that a saved notebook keeps: what nbconvert, and a page without a
kernel, show of it.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from workbench.lab import palette
from workbench.lab.live.figure import Figure, vega_config
from workbench.lab.pictures import snapshot
from workbench.lab.pictures.pictures import PictureError, render_svg
from workbench.untrusted_text import escaped

SETTLED_SECONDS = 1.5
"""A picture is drawn when nothing has changed for this long."""


class SavedPicture:
    """An output below a live widget, drawn again when the view has settled.

    A page that shows the widget hides it (`wb-saved` in board.css): replacing the widget's own
    output would remove the control that is in use. `content` gives the HTML; nothing is drawn
    before the first `show`.
    """

    def __init__(self, content: Callable[[], str]) -> None:
        self._content = content
        self._id = uuid4().hex
        self._shown = False
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self.drawn = threading.Event()
        """Set while the picture is that of the view."""

    def show(self) -> None:
        """Take a place where the notebook now writes; the picture follows."""
        from IPython.display import display

        display({"text/html": _framed(""), "text/plain": ""}, raw=True, display_id=self._id)
        self._shown = True
        self.touch()

    def touch(self) -> None:
        """The view has changed."""
        with self._lock:
            if not self._shown:
                return
            self.drawn.clear()
            if self._timer:
                self._timer.cancel()
            self._timer = threading.Timer(SETTLED_SECONDS, self._draw)
            self._timer.daemon = True
            self._timer.start()

    def _draw(self) -> None:
        from IPython.display import update_display

        update_display(
            {"text/html": _framed(self._content()), "text/plain": ""}, raw=True, display_id=self._id
        )
        self.drawn.set()


def _framed(content: str) -> str:
    return f'<div class="wb-saved">{content}</div>'


def picture_html(figures: Sequence[Figure], headline: str, lines: Sequence[str]) -> str:
    """The figures under a headline as one image; the words alone where none can be drawn."""
    words = "".join(f"<p>{escaped(line)}</p>" for line in (headline, *lines))
    drawn = [figure for figure in figures if figure.rows]
    spec: dict[str, Any] = {
        **snapshot.snapshot_spec(drawn, headline, lines),
        "config": vega_config(palette.TEXT_COLOUR),
    }
    try:
        data = base64.b64encode(render_svg(spec).encode()).decode()
    except PictureError as error:
        return f"{words}<p>The charts are left out: {escaped(str(error))}</p>"
    style = "max-width: 100%; background: white"
    return f'<img alt="{escaped(headline)}" style="{style}" src="data:image/svg+xml;base64,{data}">'
