"""Text that others wrote, made fit to be shown: names of plans and runs, log lines, unknown keys,
causes of failures.

A terminal acts on control characters, and a reader is misled by marks that turn the direction of
text (CVE-2021-42574), so neither reaches a screen or a page. Files and JSON keep the text as it is.
"""

from __future__ import annotations

import html
import re
import reprlib
from typing import Any

_CONTROL = {*range(0x00, 0x20), *range(0x7F, 0xA0)} - set(map(ord, "\n\t"))
"""C0, DEL and C1, without line feed and tab."""
_BIDIRECTIONAL = {0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_REMOVED: dict[int, str | None] = dict.fromkeys(_CONTROL | _BIDIRECTIONAL)
_SURROGATES: dict[int, str | None] = dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
"""Halves of a character, from a file name that is no UTF-8: no stream can encode them."""


HALF = re.compile("[\ud800-\udfff]")
"""Half of a character beyond the first 65,536, which an escape of YAML or JSON can say: no file can
hold it.
"""


def visible(text: str) -> str:
    """`text` without control characters (line feed and tab stay) and bidirectional marks."""
    return text if text.isascii() and text.isprintable() else text.translate(_REMOVED | _SURROGATES)


def escaped(text: str) -> str:
    """`text` for a place in HTML, quotes included."""
    return html.escape(visible(text))


MOST_SHOWN = 2_000
"""Characters of one message: what is longer is no message, but a file's content."""


def brief(text: str, most: int = MOST_SHOWN) -> str:
    """`text` without its middle where it is longer than `most`: a message names the field first,
    the legal last.
    """
    if len(text) <= most:
        return text
    end = most // 4
    return (
        f"{text[: most - end]} ... ({len(text) - most:,} characters left out) ... "
        f"{text[len(text) - end :]}"
    )


_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 200
_BRIEF.maxlevel = 3


def shown(value: Any) -> str:
    """A value in a message, cut where it is long; what is left out is not written first, however
    large it is.
    """
    try:
        text = _BRIEF.repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a very long number"
    return text if len(text) <= 60 else text[:57] + "..."
