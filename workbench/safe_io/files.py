"""Files that a person names: written whole or not at all, and read only where reading comes to an
end.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path


def replace_file(path: str | Path, text: str) -> None:
    """Write `text` to `path`, or leave `path` as it was. Raises OSError.

    A link stays a link; a device or a pipe is written to: replaced, it would be gone for every
    process of the machine.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except OSError:
        Path(draft).unlink(missing_ok=True)
        raise


def read_some(path: str | Path, most: int) -> str:
    """The text of `path`, a pipe's too. Raises OSError where it holds more than `most` bytes,
    UnicodeDecodeError.
    """
    refuse_impossible(path)
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it holds more than {most:,} bytes", os.fspath(path))
    return content.decode("utf-8")


def unread(error: OSError | UnicodeDecodeError) -> str:
    """Why a file could not be read, in words that name no codec and no number of an error."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is {error.object[error.start]:#04x}, which is no UTF-8 text"
    return error.strerror or str(error)


def refuse_impossible(path: str | Path) -> None:
    """Raise FileNotFoundError for a path that no file can have, where Python says ValueError: NUL,
    half a character.
    """
    try:
        possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise FileNotFoundError(errno.ENOENT, "no file can have this name", os.fspath(path))


def known_file(path: str | Path) -> os.stat_result:
    """What the system knows of the file. Raises OSError where it has no end: opened, a pipe or a
    device may never.
    """
    refuse_impossible(path)
    known = os.stat(path)
    if not stat.S_ISREG(known.st_mode) and not stat.S_ISDIR(known.st_mode):
        raise OSError(errno.EINVAL, "it is no file, but a pipe or a device", os.fspath(path))
    return known


def file_states(paths: Iterable[str]) -> dict[str, list[int]]:
    """Path -> [time of its last change in ns, size in bytes] of those that are files now."""
    states = {}
    for path in paths:
        if os.path.isfile(path):
            now = os.stat(path)
            states[path] = [now.st_mtime_ns, now.st_size]
    return states
