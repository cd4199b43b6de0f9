"""Integrity of stored files: size and sha256."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.checkpoint.checksums import file_sha256
from workbench.checkpoint.manifest import REMEDY, check_size
from workbench.checkpoint.tensor_index import TensorSource


def verify_files(source: TensorSource, files: Sequence[str], read: Callable[[int], None]) -> None:
    """Verify files; `read` as in `verify_file`.

    Raises:
        ValueError: A file is missing or damaged.
    """
    for file in files:
        verify_file(source, file, read)


def verify_file(
    source: TensorSource, file: str, read: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Verify a file's size, and its checksum if there is one.

    Args:
        source: The index.
        file: The file.
        read: Called with the bytes of each chunk.

    Raises:
        ValueError: The file is missing or damaged.
    """
    path, (size, sha256) = source.folder / file, source.files[file]
    check_size(path, size)
    try:
        if sha256 is not None and file_sha256(path, read) != sha256:
            raise ValueError(
                f"{path} is damaged: its content does not match its checksum; {REMEDY}"
            )
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {REMEDY}") from None
