"""Which files a corpus is made of, in a fixed order, and the hash that names their content."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

from workbench.errors import refuse
from workbench.safe_io.files import unread

TEXT = frozenset(
    {
        ".txt",
        ".md",
        ".rst",
        ".py",
        ".json",
        ".jsonl",
        ".csv",
        ".tex",
        ".html",
        ".xml",
        ".c",
        ".h",
        ".cpp",
    }
)
"""Suffixes that count as text in a folder; a file named by itself is read whatever its suffix."""
SKIPPED = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
)
"""Folders of the standard library that differ from machine to machine or are not always installed.
"""


def files(source: str) -> list[Path]:
    """Files of the corpus `source` (`stdlib`, a file or a folder), in a stable order.

    Raises `PlanError` naming `corpus.source` where there is none.
    """
    if source == "stdlib":
        found = _python(Path(sysconfig.get_paths()["stdlib"]))
    else:
        path = Path(source).expanduser()
        if not os.path.exists(
            path
        ):  # unlike `Path.exists`, False also below a folder that may not be entered
            legal = "legal: stdlib, or a text file or folder"
            raise refuse("corpus.source", f"'{source}' does not exist, or may not be read; {legal}")
        found = [path] if path.is_file() else _walk(path, TEXT, frozenset({"__pycache__"}))
    found = [path for path in found if path.stat().st_size > 0]
    if not found:
        kinds = " ".join(sorted(TEXT))
        raise refuse("corpus.source", f"'{source}' holds no text; a folder is searched for {kinds}")
    return found


def corpus_sha256(source: str) -> str:
    """Hash over the contents of the corpus, in order; names of files do not enter it."""
    total = hashlib.sha256()
    for path in files(source):
        try:
            total.update(hashlib.sha256(path.read_bytes()).digest())
        except OSError as error:
            raise refuse("corpus.source", f"{path} cannot be read: {unread(error)}") from None
    return total.hexdigest()


def _python(root: Path) -> list[Path]:
    return _walk(root, frozenset({".py"}), SKIPPED)


def _walk(root: Path, suffixes: frozenset[str], skipped: frozenset[str]) -> list[Path]:
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(d for d in inner if d not in skipped and not d.startswith("."))
        found += [Path(folder, name) for name in names if Path(name).suffix in suffixes]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
