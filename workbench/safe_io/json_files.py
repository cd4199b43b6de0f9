"""JSON that others wrote: duplicate keys refused, and what is wrong said by its place, not in
Python's words.
"""

from __future__ import annotations

import json
import re
from typing import Any

from workbench.errors import refuse
from workbench.safe_io.yaml_files import MOST_DIGITS
from workbench.untrusted_text import HALF

_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape that begins or ends a character of two, or stands alone for half of it."""


def parse(text: str, where: str, constants: bool = False) -> Any:
    """The value of JSON `text`; `constants`: NaN and Infinity, which Python writes and JSON does
    not know, are numbers.

    Raises `PlanError` naming line and column, or a key that is written twice.
    """
    try:
        found = json.loads(
            text.removeprefix("\ufeff"),
            object_pairs_hook=_once,
            parse_int=_integer,
            parse_constant=None if constants else _no_number,
        )
        half = HALF.search(json.dumps(found, ensure_ascii=False)) if _ESCAPED.search(text) else None
    except json.JSONDecodeError as error:
        raise refuse(
            where, f"not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except RecursionError:
        raise refuse(where, "not valid JSON: nested too deeply") from None
    if half:
        raise refuse(where, f"not valid JSON: {half[0]!a} is half of a character")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise refuse(key, "is written twice; keep one of them")
        found[key] = value
    return found


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise refuse(
            "",
            f"not valid JSON: an integer of {len(text):,} digits; legal: at most {MOST_DIGITS:,}",
        )
    return int(text)


def _no_number(word: str) -> Any:
    raise refuse("", f"{word} is no number of JSON; legal: finite numbers")
