"""Integrity of a checkpoint's files by the manifest's checksums, without torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from workbench.checkpoint.manifest import REMEDY, read_manifest
from workbench.checkpoint.resume_point import is_gguf, is_huggingface_folder
from workbench.errors import refuse
from workbench.units import GIB

CHUNK_BYTES = 8 * 2**20
"""Bytes hashed at once."""
MAX_PREFLIGHT_BYTES = 8 * GIB
"""Checkpoints up to this size are verified before a launch, which takes less than 10 s at 1 GB/s.
Larger ones are verified by the ranks, each its share.
"""
PROGRESS_BYTES = 256 * 2**20
"""Bytes between two calls of `progress`, each of which is a line without a terminal."""

CheckProgress = Callable[[str], None]


def refuse_damaged(folder: Path, progress: CheckProgress = lambda words: None) -> None:
    """Verify a checkpoint's files against their checksums before a launch.

    Checkpoints of more than `MAX_PREFLIGHT_BYTES`, and weights without checksums, are left to the
    ranks, which verify what they read.

    Args:
        folder: The checkpoint, or weights.
        progress: Called with a description of the progress.

    Raises:
        PlanError: Names the first damaged file.
    """
    weights = is_huggingface_folder(folder) or is_gguf(folder)
    files = [] if weights else read_manifest(folder)["files"]
    total, done = sum(file["bytes"] for file in files), 0

    def read(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if done % PROGRESS_BYTES < nbytes or done == total:
            progress(f"checking checkpoint, {done >> 20} of {total >> 20} MiB")

    for file in files if total <= MAX_PREFLIGHT_BYTES else ():
        path = folder / file["file"]
        try:
            intact = file_sha256(path, read) == file["sha256"]
        except OSError as error:
            raise refuse(
                "checkpoint.load", f"{path} cannot be read: {error.strerror}; {REMEDY}"
            ) from None
        if not intact:
            why = f"{path} is damaged: its content does not match its checksum; {REMEDY}"
            raise refuse("checkpoint.load", why)


def file_sha256(path: Path, read: Callable[[int], None] = lambda nbytes: None) -> str:
    """sha256 of a file; `read` is called with the bytes of every chunk."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            total.update(chunk)
            read(len(chunk))
    return total.hexdigest()
