"""Integrity of a checkpoint by its manifest's sizes and checksums, without torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.checkpoint.manifest import FINITE, MANIFEST, REMEDY, check_size, read_manifest
from workbench.checkpoint.resume_point import LOAD, STEP, step_folders
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


def damage(
    folder: Path, progress: CheckProgress | None = None, most_bytes: int = MAX_PREFLIGHT_BYTES
) -> str:
    """Reason why training cannot go on from a checkpoint; empty where it is intact and finite.

    Args:
        folder: The checkpoint.
        progress: Called with a description of the progress, while checksums are verified; None:
            only manifest and sizes are.
        most_bytes: Checksums of a larger checkpoint are left to the ranks, which verify what they
            read.
    """
    try:
        body = read_manifest(folder)
        if body["meta"].get(FINITE) is False:
            return f"'{folder}' has NaN or infinite values"
        for file in body["files"]:
            check_size(folder / file["file"], file["bytes"])
        if progress is not None:
            _verify_checksums(folder, body["files"], progress, most_bytes)
    except ValueError as error:
        return str(error).removesuffix(f"; {REMEDY}")
    return ""


def refuse_damaged(folder: Path, progress: CheckProgress = lambda words: None) -> None:
    """Verify a checkpoint against its manifest before a launch; weights have none.

    Args:
        folder: The checkpoint, or weights.
        progress: As of `damage`.

    Raises:
        PlanError: Names the first damaged file, and the newest intact checkpoint beside it.
    """
    if (folder / MANIFEST).is_file() and (why := damage(folder, progress)):
        raise refuse(LOAD, f"{why}; {another_checkpoint(folder)}")


def another_checkpoint(damaged: Path) -> str:
    """Advice on what to take in place of a damaged checkpoint."""
    if not STEP.fullmatch(damaged.name):
        return REMEDY
    others = (path for path in reversed(step_folders(damaged.parent)) if path.name != damaged.name)
    intact = next((path for path in others if not damage(path, lambda words: None)), None)
    words = f"the newest intact one is '{intact}'" if intact else "none beside it is intact"
    return f"{REMEDY}: {words}"


def _verify_checksums(
    folder: Path, files: list[dict[str, Any]], progress: CheckProgress, most_bytes: int
) -> None:
    total, done = sum(file["bytes"] for file in files), 0

    def read(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if done % PROGRESS_BYTES < nbytes or done == total:
            progress(f"checking checkpoint, {done >> 20} of {total >> 20} MiB")

    for file in files if total <= most_bytes else ():
        path = folder / file["file"]
        try:
            intact = file_sha256(path, read) == file["sha256"]
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        if not intact:
            raise ValueError(f"{path} is damaged: its content does not match its checksum")


def file_sha256(path: Path, read: Callable[[int], None] = lambda nbytes: None) -> str:
    """sha256 of a file; `read` is called with the bytes of every chunk."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            total.update(chunk)
            read(len(chunk))
    return total.hexdigest()
