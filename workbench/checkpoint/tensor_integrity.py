"""Integrity of stored files: size and sha256; without checksum, no NaN or infinity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import SafetensorError

from workbench.checkpoint.checksums import CHUNK_BYTES, file_sha256
from workbench.checkpoint.manifest import REMEDY, check_size
from workbench.checkpoint.tensor_index import TensorSource


def verify_files(source: TensorSource, files: Sequence[str]) -> None:
    """Verify files.

    Raises:
        ValueError: A file is missing or damaged.
    """
    for file in files:
        verify_file(source, file)


def verify_file(
    source: TensorSource, file: str, read: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Verify a file's size and checksum; of a file without checksum, that its values are finite.

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
        if sha256 is None:
            _refuse_non_finite(source, path, _keys(source, file))
        elif file_sha256(path, read) != sha256:
            raise ValueError(
                f"{path} is damaged: its content does not match its checksum; {REMEDY}"
            )
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}; {REMEDY}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {REMEDY}") from None


def _keys(source: TensorSource, file: str) -> list[str]:
    return sorted(
        {box.key for stored in source.tensors.values() for box in stored.boxes if box.file == file}
    )


def _refuse_non_finite(source: TensorSource, path: Path, keys: Sequence[str]) -> None:
    with source.opened(path) as opened:
        for key in keys:
            values = opened.get_tensor(key).flatten()
            bad = sum(int((~part.isfinite()).sum()) for part in values.split(CHUNK_BYTES))
            if bad:
                raise ValueError(
                    f"{path}: {bad} of the {values.numel()} values of {key} are NaN or infinite; "
                    "get intact weights"
                )
