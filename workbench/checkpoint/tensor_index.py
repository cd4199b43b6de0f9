"""Index of stored tensors: boxes of global tensors, in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.checkpoint.checkpoint_format import Slices
from workbench.checkpoint.manifest import REMEDY, read_manifest
from workbench.checkpoint.safetensors_reader import SafetensorsFile
from workbench.checkpoint.safetensors_writer import TORCH_DTYPES


@dataclass(frozen=True)
class Box:
    """A box of a global tensor, stored in a file under `key`."""

    file: str
    key: str
    slices: Slices
    dtype: str
    origin: tuple[int, ...] | None = None
    """Where in the stored tensor the box begins, dim by dim; None: it is the stored tensor."""
    transposed: bool = False
    """Whether the stored tensor's last two dims are swapped."""


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor, stored in one or more boxes."""

    shape: tuple[int, ...]
    boxes: Sequence[Box]


@dataclass(frozen=True)
class TensorSource:
    """Index of a folder: tensors by (name, kind), and (bytes, sha256 or None) of each file."""

    folder: Path
    tensors: Mapping[tuple[str, str], StoredTensor]
    files: Mapping[str, tuple[int, str | None]]
    meta: Mapping[str, Any]
    exact: bool = True
    """Whether a tensor of another dtype is refused instead of converted."""
    opened: Callable[[Path], AbstractContextManager[Any]] = SafetensorsFile
    """Opens a file: get_slice, get_tensor and position by key, as `SafetensorsFile` has them."""
    left_out: str = ""
    """What of the files is no part of the model, in a sentence."""


def checkpoint_source(folder: Path) -> TensorSource:
    """Index of a checkpoint.

    Raises:
        ValueError: Its manifest is damaged, or names an unknown dtype.
    """
    body = read_manifest(folder)
    found: dict[tuple[str, str], StoredTensor] = {}
    for entry in body["files"]:
        for tensor in entry["tensors"]:
            if tensor["dtype"] not in TORCH_DTYPES:
                legal = ", ".join(TORCH_DTYPES)
                raise ValueError(
                    f"{folder}: {tensor['key']} is {tensor['dtype']}; legal: {legal}; {REMEDY}"
                )
            slices = tuple((start, stop) for start, stop in tensor["slices"])
            box = Box(entry["file"], tensor["key"], slices, tensor["dtype"])
            stored = found.setdefault(
                (tensor["name"], tensor["kind"]), StoredTensor(tuple(tensor["shape"]), [])
            )
            assert isinstance(stored.boxes, list)
            stored.boxes.append(box)
    files = {entry["file"]: (entry["bytes"], entry["sha256"]) for entry in body["files"]}
    return TensorSource(folder, found, files, body["meta"])


def weights_of_checkpoint(folder: Path) -> TensorSource:
    """Index of a checkpoint's parameters alone, in whatever dtype.

    Raises:
        ValueError: As `checkpoint_source`.
    """
    source = checkpoint_source(folder)
    parameters = {key: stored for key, stored in source.tensors.items() if key[1] == "parameter"}
    return replace(source, tensors=parameters, exact=False)
