"""Hashes that name what fine-tuning starts from: base weights, and adapters to go on from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from workbench.errors import refuse
from workbench.plan.catalog.huggingface_files import weight_files
from workbench.safe_io.files import unread
from workbench.safe_io.gguf_files import SUFFIX

MANIFEST, CONFIG = "manifest.json", "config.json"
"""What makes a folder a checkpoint of the workbench, or one of Hugging Face weights."""
ADAPTERS = "adapter_model.safetensors"
"""The adapters of a folder in PEFT's format."""
CHUNK_BYTES = 8 * 2**20
"""Bytes hashed at once."""
HashProgress = Callable[[int, int], None]
"""Called with bytes done and in all."""


def base_sha256(
    path: str | Path, field: str = "finetune.base", progress: HashProgress = lambda done, of: None
) -> str:
    """Hash of the content of base weights; names of files do not enter it.

    Of a checkpoint its manifest is hashed, which holds the checksums of its files.

    Args:
        path: A Hugging Face folder, a GGUF file, or a checkpoint.
        field: Field of the plan that errors name.
        progress: Called after each chunk.

    Raises:
        PlanError: It is none of these, or cannot be read.
    """
    files = _base_files(Path(path), field)
    total, done, hashes = sum(os.path.getsize(file) for file in files), 0, []

    def read(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    for file in files:
        try:
            hashes.append(_file_digest(file, read))
        except OSError as error:
            raise refuse(field, f"{file} cannot be read: {unread(error)}") from None
    one = len(hashes) == 1
    return hashes[0].hex() if one else hashlib.sha256(b"".join(hashes)).hexdigest()


def adapters_sha256(folder: str | Path, field: str = "finetune.lora.initial") -> str:
    """Hash of the adapters of a folder in PEFT's format; what its configuration says is the plan's.

    Args:
        folder: The folder.
        field: Field of the plan that errors name.

    Raises:
        PlanError: It holds none, or they cannot be read.
    """
    path = Path(folder, ADAPTERS)
    try:
        return _file_digest(path, lambda nbytes: None).hex()
    except OSError as error:
        raise refuse(field, f"'{path}' cannot be read: {unread(error)}") from None


def _base_files(path: Path, field: str) -> list[Path]:
    if path.suffix == SUFFIX and path.is_file():
        return [path]
    if (path / MANIFEST).is_file():
        return [path / MANIFEST]
    if (path / CONFIG).is_file():
        try:
            return [path / name for name in weight_files(path)]
        except ValueError as error:
            raise refuse(field, str(error)) from None
    why = "holds no weights" if path.exists() else "does not exist"
    legal = "a folder of Hugging Face weights, a GGUF file, or a checkpoint"
    raise refuse(field, f"'{path}' {why}; legal: {legal}")


def _file_digest(path: Path, read: Callable[[int], None]) -> bytes:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            total.update(chunk)
            read(len(chunk))
    return total.digest()
