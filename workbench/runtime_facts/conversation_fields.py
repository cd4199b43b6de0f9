"""Formats of conversations, and the fields of a row by which each is recognised.

Rows are those of TRL's dataset formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFERENCES = "preferences"
FIELDS: dict[str, tuple[str, ...]] = {
    PREFERENCES: ("chosen", "rejected"),
    "completions": ("prompt", "completion"),
    "messages": ("messages",),
}
"""Format -> fields that every row of it has, the most particular first."""
TEXT = "text"
"""Field of a row of plain text."""


def row_format(row: Mapping[str, Any]) -> str | None:
    """The format of a row with these fields; None for one of plain text."""
    if TEXT in row:
        return None
    return next((kind for kind, names in FIELDS.items() if row.keys() >= set(names)), None)


def rows_of_conversations() -> str:
    """What rows of conversations have, for a message: `'messages', or 'prompt' and ..`."""
    named = (" and ".join(f"'{name}'" for name in names) for names in reversed(FIELDS.values()))
    return ", or ".join(named)
