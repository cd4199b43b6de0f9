"""Manifest of a checkpoint: its files and their boxes of global tensors, and its own checksum.

A manifest from `read_manifest` is well-formed: every field is there, every box lies within its
tensor, and every file is in the checkpoint's own folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from workbench.safe_io.json_field_checks import has, list_of, object_, text, whole

MANIFEST = "manifest.json"
"""Name of the manifest, which is written last."""
VERSION = 2
REMEDY = "take another checkpoint (checkpoint.load)"
FINITE = "finite"
"""Entry of `meta` that is false where a value is NaN or infinite; absent otherwise."""
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
"""File name in the folder itself: no separator, no `..`, not hidden."""

_TENSOR = {
    "key": text,
    "name": text,
    "kind": text,
    "dtype": text,
    "shape": list_of(whole),
    "slices": list_of(list_of(whole)),
}
_FILE = {
    "file": text,
    "bytes": whole,
    "sha256": text,
    "tensors": list_of(lambda item: has(item, _TENSOR)),
}


def manifest_text(body: dict[str, Any]) -> str:
    """Text of a manifest: `body` (version, meta, files) and its checksum."""
    plain = json.loads(json.dumps(body))
    return json.dumps({**plain, "sha256": _digest(plain)})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest of a checkpoint.

    Returns:
        `version`, `meta`, and `files` with their tensors.

    Raises:
        ValueError: There is none, it is damaged, or it is of another version.
    """
    path = folder / MANIFEST
    try:
        content = path.read_text(encoding="utf-8")
        manifest = json.loads(content)
        body: dict[str, Any] = {key: value for key, value in manifest.items() if key != "sha256"}
        intact = content == manifest_text(body)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{folder} is not a finished checkpoint: it has no {MANIFEST}; {REMEDY}"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {REMEDY}") from None
    except (ValueError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise ValueError(f"{path} is damaged: its content does not match its checksum; {REMEDY}")
    if body.get("version") != VERSION:
        raise ValueError(
            f"{path} is of version {body.get('version')}, this one reads version {VERSION}; "
            f"{REMEDY}"
        )
    if wrong := _wrong(folder, body):
        raise ValueError(f"{path} is damaged: {wrong}; {REMEDY}")
    return body


def is_finite(folder: Path) -> bool:
    """Whether the manifest reports no NaN or infinity; true where it cannot be read."""
    try:
        return read_manifest(folder)["meta"].get(FINITE) is not False
    except ValueError:
        return True


def check_size(path: Path, size: int) -> None:
    """Check that a checkpoint's file has the size in its manifest.

    Raises:
        ValueError: The file is missing or has another size.
    """
    try:
        now = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {REMEDY}") from None
    if now != size:
        raise ValueError(f"{path} is damaged: {now} bytes instead of {size}; {REMEDY}")


def _wrong(folder: Path, body: dict[str, Any]) -> str:
    """The first problem of a manifest's form; empty without one."""
    if not object_(body.get("meta")):
        return "meta is no object"
    if type(files := body.get("files")) is not list:
        return "files is no list"
    for number, file in enumerate(files):
        if not has(file, _FILE):
            return f"files[{number}] does not say file, bytes, sha256 and tensors as it should"
        if not _PLAIN.fullmatch(file["file"]):
            return (
                f"files[{number}] is {file['file']!r}; legal: the name of a file in the "
                f"checkpoint's own folder"
            )
        if (folder / file["file"]).is_symlink():
            return f"{file['file']} is a link; legal: a file in the checkpoint's own folder"
        for tensor in file["tensors"]:
            if not _is_box(tensor["shape"], tensor["slices"]):
                return (
                    f"{tensor['key']} of {file['file']} has slices {tensor['slices']} of shape "
                    f"{tensor['shape']}"
                )
    return ""


def _is_box(shape: list[int], slices: list[list[int]]) -> bool:
    """Whether `slices` are [start, stop) of a tensor of `shape`, one pair a dim."""
    pairs = len(slices) == len(shape) and all(len(pair) == 2 for pair in slices)
    return pairs and all(start <= stop <= extent for (start, stop), extent in zip(slices, shape))


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
