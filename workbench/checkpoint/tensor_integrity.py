"""Whether a stored file is what was written; where no checksum says what that was, whether its
values are numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from workbench.checkpoint.checksums import CHUNK_BYTES, file_sha256
from workbench.checkpoint.manifest import REMEDY, check_size
from workbench.checkpoint.tensor_index import TensorSource


def verify_files(source: TensorSource, files: Sequence[str]) -> None:
    """ValueError where one of the files is missing, or is not what was written."""
    for file in files:
        verify_file(source, file)


def verify_file(
    source: TensorSource, file: str, read: Callable[[int], None] = lambda nbytes: None
) -> None:
    """ValueError where a file is missing, or is not what was written; `read` is told of every
    chunk.

    A file without a checksum comes from elsewhere: it is refused where a value of its tensors is
    NaN or infinite.
    """
    path, (size, sha256) = source.folder / file, source.files[file]
    check_size(path, size)
    try:
        if sha256 is None:
            _refuse_non_finite(path, _keys(source, file))
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


def _refuse_non_finite(path: Path, keys: Sequence[str]) -> None:
    with safe_open(path, framework="pt") as opened:
        for key in keys:
            values = opened.get_tensor(key).flatten()
            bad = sum(int((~part.isfinite()).sum()) for part in values.split(CHUNK_BYTES))
            if bad:
                raise ValueError(
                    f"{path}: {bad} of the {values.numel()} values of {key} are NaN or infinite, "
                    f"and "
                    "training from them would learn nothing; get weights that are whole"
                )
