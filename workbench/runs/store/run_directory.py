"""The run directory: made whole under another name, then renamed, so that a half-written one is
never seen.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from workbench.errors import PlanError, Problem

FOLDERS = ("telemetry", "logs", "errors", "checkpoints", "frames")
MODE = 0o700
"""Of a run directory: its logs, plan and command name paths and hosts, and its checkpoints are
somebody's work.
"""
ROOT = "WORKBENCH_RUNS"
"""Environment variable: folder of run directories, instead of ./runs."""


def default_root(root: str | Path | None = None) -> Path:
    """The folder that holds runs: `root`, else $WORKBENCH_RUNS, else ./runs; absolute."""
    return Path(root or os.environ.get(ROOT) or "runs").expanduser().absolute()


def slug(name: str) -> str:
    """`name` as a part of a folder name: lower case, at most 40 letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-") or "run"


def create(root: Path, name: str, fill: Callable[[Path, Path], None]) -> Path:
    """Make a run directory named by the time and `name`; its final path.

    `fill(folder, final)` writes the content into `folder`, which becomes `final` in one rename;
    where it raises, nothing is left. Raises `PlanError` naming `root` where that cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
    except OSError as error:
        raise unwritable(root, error) from error
    try:
        for sub in FOLDERS:
            (folder / sub).mkdir()
        return _settle(folder, root, f"{time.strftime('%Y%m%d-%H%M%S')}-{slug(name)}", fill)
    except OSError as error:
        raise unwritable(root, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unwritable(root: Path, error: OSError) -> PlanError:
    """The error of a root that cannot hold runs."""
    legal = f"give a folder that you may write (--root, or the environment variable {ROOT})"
    return PlanError(
        [Problem("root", f"runs cannot be written in {root}: {error.strerror or error}; {legal}")]
    )


def _settle(folder: Path, root: Path, stem: str, fill: Callable[[Path, Path], None]) -> Path:
    """Fill `folder` and rename it to the first free name: another run may have started in the same
    second.
    """
    folder.chmod(MODE)
    for attempt in range(1, 1000):
        final = root / (stem if attempt == 1 else f"{stem}-{attempt}")
        if final.exists():
            continue
        fill(folder, final)
        try:
            folder.rename(final)
            return final
        except OSError:
            if not final.exists():
                raise
    raise AssertionError(f"a thousand runs named {stem}")
