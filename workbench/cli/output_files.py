"""Files that commands write: whole or not at all, refused before the work that they are about."""

from __future__ import annotations

import os
from pathlib import Path

from workbench.errors import refuse
from workbench.safe_io.files import replace_file

NAME_BYTES = 255
"""Of the longest file name that Linux takes."""


def write_whole(path: Path, text: str, option: str = "--output") -> None:
    """Write `text` to `path`, or leave `path` as it was. Raises `PlanError` naming `option`.

    A link stays a link; a device or a pipe is written to, not replaced.
    """
    try:
        replace_file(path, text)
    except OSError as error:
        raise refuse(option, f"'{path}' cannot be written: {error.strerror or error}") from None


def writable(path: Path | None, option: str = "--html") -> None:
    """Refuse a file of an option that could not be written, before the work that it is about."""
    if path is None:
        return
    why = (
        ""
        if len(os.fsencode(path.name)) <= NAME_BYTES
        else f": its name has more than {NAME_BYTES} bytes"
    )
    if why or not (path.parent.is_dir() and os.access(path.parent, os.W_OK) and not path.is_dir()):
        raise refuse(
            option,
            f"'{path.name[:60]}' cannot be written{why}; legal: a file in a folder that exists",
        )
