"""Lines of JSON that say how far a child process is, among what a user's model prints itself."""

from __future__ import annotations

import json
from typing import Any


def progress_record(text: str) -> dict[str, Any] | None:
    """The record in a line: `done`, `of` and what the child adds; None for any other line."""
    if not text.startswith("{"):
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    known = all(isinstance(record.get(key), int | float) for key in ("done", "of"))
    return record if known else None
