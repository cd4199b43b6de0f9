"""Which files a user's code reads while it builds a module, so that a trace of it can be kept."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workbench.safe_io.files import file_states

LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
"""Folders of Python and of what is installed, which do not change while a process runs."""
NOT_USERS = (*LIBRARIES, str(Path(__file__).parents[2]), "/proc/", "/sys/", "/dev/")


@contextmanager
def user_files() -> Iterator[dict[str, list[int]]]:
    """Collects what is imported or opened in the block, outside of installed libraries.

    Yields:
        Path -> [time of its last change in ns, size], filled when the block ends.
    """
    opened, found, active = set[str](), dict[str, list[int]](), True

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if active and event == "open" and isinstance(arguments[0], str):
            opened.add(arguments[0])

    sys.addaudithook(on_event)  # it stays until the process ends
    try:
        yield found
    finally:
        active = False
    imported = {getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]}
    paths = sorted({os.path.abspath(path) for path in opened | imported - {""}})
    found |= file_states([p for p in paths if not p.startswith(NOT_USERS)])
