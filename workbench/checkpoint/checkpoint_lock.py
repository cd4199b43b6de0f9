"""Lock on a run's folder of checkpoints: one run writes at a time, and clears unfinished ones."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

FREE_SPACE = "free space there, or save less often (checkpoint.every, checkpoint.keep)"
MAKE_WRITABLE = "make it writable, or keep runs elsewhere (--root)"
CHECK_DISK = "see to that disk, or keep runs elsewhere (--root)"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), FREE_SPACE),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR), MAKE_WRITABLE),
}
"""errno -> what to do; `CHECK_DISK` for others."""


def lock_checkpoints(folder: Path) -> int:
    """Create and lock the folder of checkpoints, and clear what killed runs have left.

    Returns:
        A descriptor, which holds the lock while it is open.

    Raises:
        ValueError: The folder cannot be written, or another run writes to it.
    """
    if folder.is_symlink():
        own = "legal: a folder of the run's own; to write elsewhere keep the run there (--root)"
        raise ValueError(f"checkpoint: {folder} is a link, whose target would be cleared; {own}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = _locked(folder)
        except BlockingIOError:
            raise ValueError(
                f"checkpoint: another run writes to {folder}; stop it, or start this one in a run "
                f"directory of its own"
            ) from None
        except OSError:  # A file system without locks: the runs' tokens keep them apart.
            descriptor = os.open(folder, os.O_RDONLY)
        _tidy(folder)
        (folder / ".draft").write_bytes(b"")
        (folder / ".draft").unlink()
    except OSError as error:
        raise unwritable_error(folder, error) from error
    return descriptor


def clear_unfinished(folder: Path) -> None:
    """Clear what killed runs have left, unless a run still writes to the folder or none may.

    A link is left alone: its target is not the run's.
    """
    if folder.is_symlink():
        return
    with suppress(OSError):
        descriptor = _locked(folder)
        try:
            _tidy(folder)
        finally:
            os.close(descriptor)


def unwritable_error(path: Path, error: OSError) -> ValueError:
    """The error for a disk that refuses a write, with the remedy."""
    return ValueError(
        f"checkpoint: cannot write {path}: {error.strerror or error}; "
        f"{_REMEDIES.get(error.errno or 0, CHECK_DISK)}"
    )


def _locked(folder: Path) -> int:
    """A descriptor with the folder's lock.

    Raises:
        BlockingIOError: Another process has it.
        OSError: The file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _tidy(folder: Path) -> None:
    """Remove unfinished checkpoints; one that was about to be replaced gets its name back."""
    for path in folder.glob("step-*.replaced"):
        if not (final := path.with_suffix("")).exists():
            path.rename(final)
    for path in (*folder.glob("step-*.replaced"), *folder.glob("step-*.writing-*")):
        shutil.rmtree(path, ignore_errors=True)
