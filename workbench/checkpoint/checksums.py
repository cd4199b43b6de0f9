"""Whether the files of a checkpoint are what was written, by the checksums in its manifest; without
torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from workbench.checkpoint.manifest import REMEDY, read_manifest
from workbench.checkpoint.resume_point import is_huggingface_folder
from workbench.errors import refuse
from workbench.units import GIB

CHUNK_BYTES = 8 * 2**20
"""Bytes hashed at once."""
MAX_PREFLIGHT_BYTES = 8 * GIB
"""Checkpoints up to this size are read before a launch: under 10 s at 1 GB/s. Of larger ones ranks
read their share.
"""
PROGRESS_BYTES = 256 * 2**20
"""Bytes between two calls of `progress`: without a terminal each is a line."""

CheckProgress = Callable[[str], None]


def refuse_damaged(folder: Path, progress: CheckProgress = lambda words: None) -> None:
    """Raise `PlanError` naming the first file of the checkpoint in `folder` whose content is not
    what was written.

    A checkpoint of more than `MAX_PREFLIGHT_BYTES`, and weights without checksums, are left to the
    ranks, which check what they read. `progress` is called with how far it is.
    """
    files = [] if is_huggingface_folder(folder) else read_manifest(folder)["files"]
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
