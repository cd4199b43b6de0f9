"""One place in a notebook that is first a live widget and at the end a picture."""

from __future__ import annotations

import threading
from typing import Any
from uuid import uuid4


class OutputCell:
    """A cell's output, known by an id of its own, so that it can be replaced from any thread."""

    def __init__(self) -> None:
        self.id = uuid4().hex
        self._lock = threading.Lock()
        self._shown = False
        self._instead: dict[str, Any] | None = None

    def show(self, data: dict[str, Any]) -> None:
        """Put a mime bundle where the notebook now writes, or what has replaced it meanwhile."""
        from IPython.display import display

        with self._lock:
            display(self._instead or data, raw=True, display_id=self.id)
            self._shown = True

    def replace(self, data: dict[str, Any]) -> None:
        """Put another mime bundle in its place, now and wherever it is shown later."""
        from IPython.display import update_display

        with self._lock:
            self._instead = data
            if self._shown:
                update_display(data, raw=True, display_id=self.id)


def widget_bundle(widget: Any, text: str) -> dict[str, Any]:
    """Mime bundle of a live widget, with `text` for viewers without widgets."""
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"application/vnd.jupyter.widget-view+json": view, "text/plain": text}
