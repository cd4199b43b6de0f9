"""The line of this repository that is being executed, and those that called it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[2]
OWN = {
    str(Path(__file__).with_name(f"{name}.py"))
    for name in ("async_sanitizer", "python_lines", "tensor_accesses", "memory_ranges")
}
NUM_LINES = 8


def python_lines() -> str:
    """Up to `NUM_LINES` lines `file:line`, the innermost first, joined by ` < `.

    torch, the standard library and the sanitizer itself are left out.
    """
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < NUM_LINES:
        if _is_shown(file := frame.f_code.co_filename):
            line = f"{Path(file).relative_to(ROOT)}:{frame.f_lineno}"
            found += [line] if found[-1:] != [line] else []  # a comprehension is a frame of its own
        frame = frame.f_back
    return " < ".join(found) or "no line of Python"


def _is_shown(file: str) -> bool:
    return file.startswith(f"{ROOT}/") and "site-packages" not in file and file not in OWN
