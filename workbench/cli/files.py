"""Files that commands write: whole or not at all, refused before the work that they are about."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from workbench.plan.errors import refuse


def write_whole(path: Path, text: str, option: str = "--output") -> None:
    """Write `text` to `path`, or leave `path` as it was. Raises `PlanError` naming `option`.

    A link stays a link; a device or a pipe is written to, not replaced.
    """
    draft = None
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_text(text, encoding="utf-8")
            return
        path = path.resolve()
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except OSError as error:
        if draft:
            Path(draft).unlink(missing_ok=True)
        raise refuse(option, f"'{path}' cannot be written: {error.strerror or error}") from None


def writable(path: Path | None) -> None:
    """Refuse a report that could not be written, before the work that it is about."""
    if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK) and not path.is_dir()):
        raise refuse("--html", f"'{path}' cannot be written; legal: a file in a folder that exists")
