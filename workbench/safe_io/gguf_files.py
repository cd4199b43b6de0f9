"""GGUF files: one file that holds a model's weights, its shape and its tokenizer, by the package
`gguf`. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from workbench.errors import refuse

SUFFIX = ".gguf"
VERSIONS = 2, 3


class GgufFile:
    """An open GGUF file: metadata are read at once, tensors stay on the disk (memory-mapped)."""

    def __init__(self, path: Path, reader: Any) -> None:
        self.path = path
        self.tensors: Mapping[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        """Name -> `gguf.gguf_reader.ReaderTensor`."""
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key; `default` where it is absent.

        Raises:
            PlanError: It is no UTF-8 text.
        """
        field = self._fields.get(key)
        try:
            return default if field is None else field.contents()
        except UnicodeDecodeError:
            raise refuse("", f"{self.path}: {key} is no UTF-8 text; get the file again") from None

    def fields(self, prefix: str) -> dict[str, Any]:
        """Metadata keys that begin with `prefix` -> their `gguf.ReaderField`."""
        return {key: field for key, field in self._fields.items() if key.startswith(prefix)}

    def keys(self) -> list[str]:
        """The metadata keys."""
        return list(self._fields)


def open_gguf(path: str | Path, field: str = "model") -> GgufFile:
    """Open a GGUF file; opened again unchanged, it is not parsed again.

    Args:
        path: The file.
        field: Field of the plan that errors name.

    Raises:
        PlanError: The file cannot be read, is no GGUF file, or is cut short.
    """
    try:
        status = os.stat(path)
        return _opened(Path(path), status.st_mtime_ns, status.st_size)
    except ImportError:
        raise refuse(
            field,
            f"'{path}' is a GGUF file, which the package gguf reads; pip install 'workbench[gguf]'",
        ) from None
    except OSError as error:
        raise refuse(field, f"'{path}' cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, IndexError, OverflowError, RecursionError) as error:
        why = str(error) if isinstance(error, _Damage) else _damage(Path(path))
        raise refuse(field, f"'{path}' is no intact GGUF file: {why}; get the file again") from None


class _Damage(ValueError):
    """What is wrong with a file."""


def _damage(path: Path) -> str:
    """What is wrong with a file that `gguf`'s reader cannot parse, in words for its owner."""
    with path.open("rb") as file:
        content = file.read(8)
    magic, version = content[:4], int.from_bytes(content[4:], "little")
    if len(content) < 8:
        return f"it ends at byte {len(content)}, within its header"
    if magic != b"GGUF":
        return f"it begins with {magic!r} in place of b'GGUF'"
    if version not in VERSIONS:
        return f"it is of version {version}; legal: {' or '.join(map(str, VERSIONS))}"
    return "its header is damaged"


@lru_cache(maxsize=1)
def _opened(path: Path, modified: int, size: int) -> GgufFile:
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """`gguf`'s reader, which would read past the end of a truncated file as empty values."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            if len(found) < int(count):
                raise _Damage(f"it ends at byte {size}, within what its header announces")
            return found

    if size == 0:
        raise _Damage("it is empty")
    return GgufFile(path, Reader(path))
