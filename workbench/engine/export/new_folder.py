"""A folder that an export writes: it appears once all of it is written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench.errors import PlanError, refuse


def check_new_folder(to: Path) -> None:
    """Refuse a folder `--to` that holds something already.

    Raises:
        PlanError: It does, or is no folder.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise refuse("--to", f"'{to}' is there already; legal: a new folder, or an empty one")


@contextmanager
def new_folder(to: Path) -> Iterator[Path]:
    """A context with a folder to write in, which becomes `to` at its end; on an error nothing of it
    is left.

    Raises:
        PlanError: The disk refuses.
    """
    writing = to.with_name(f".{to.name}.writing-{os.getpid()}")
    try:
        writing.mkdir(parents=True)
        yield writing
        if to.exists():
            to.rmdir()
        writing.rename(to)
    except OSError as error:
        raise unwritable(to, error) from None
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def unwritable(to: Path, error: OSError) -> PlanError:
    """What says that `to` cannot be written, and why."""
    return refuse(
        "--to",
        f"'{to}' cannot be written: {error.strerror or error}; free space there, or choose "
        "another folder",
    )
