"""Weights of a GGUF file as stored tensors: a rank dequantises only the rows and blocks it needs.

llama.cpp's converter permutes the rows of Llama's queries and keys, so that rotary pairs are
adjacent (`LlamaModel.permute` of convert_hf_to_gguf.py); here, as in transformers, an entry is
paired with the one half a head further. Reading undoes it.
"""

from __future__ import annotations

import math
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.checkpoint.gguf.gguf_metadata import FIELD, check_gguf
from workbench.checkpoint.huggingface.huggingface_names import WEIGHT_KINDS, parameter_shapes
from workbench.checkpoint.tensor_index import Box, StoredTensor, TensorSource
from workbench.plan.catalog.families.stored_parts import StoredPart, stored_extents
from workbench.plan.catalog.gguf_architectures import ARCHITECTURES
from workbench.plan.model.model_shape import Shape
from workbench.safe_io.gguf_files import GgufFile, open_gguf

PERMUTED = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")
"""Tensors whose rows are permuted, in architectures that do."""


def gguf_parts(architecture: str, shape: Shape) -> dict[str, list[StoredPart]]:
    """Each parameter of a model -> its parts in a file of the architecture."""
    names = ARCHITECTURES[architecture].names
    return {
        name: names.parts(name, extent, shape) for name, extent in parameter_shapes(shape).items()
    }


def gguf_source(path: Path, shape: Shape) -> TensorSource:
    """Index of the weights in a GGUF file.

    Args:
        path: The file.
        shape: The plan's model.

    Returns:
        Each weight, as the source of the parameter and of its master weight.

    Raises:
        ValueError: The file is damaged, incomplete or of another model; names field or tensor.
    """
    file = check_gguf(path, shape)
    architecture = file.get("general.architecture")
    parts = gguf_parts(architecture, shape)
    for key, needed in stored_extents(parts).items():
        if key not in file.tensors:
            raise ValueError(f"{path} has no {key}, which its model needs; get the complete file")
        if (has := _extent(file.tensors[key])) != needed:
            raise ValueError(
                f"{path}: {key} has shape {has}, its metadata say {needed}; get the file again"
            )
    tensors: dict[tuple[str, str], StoredTensor] = {}
    for name, extent in parameter_shapes(shape).items():
        boxes = [_box(path, file, part) for part in parts[name]]
        tensors |= {(name, kind): StoredTensor(extent, boxes) for kind in WEIGHT_KINDS}
    ignored = re.compile(f"(.*\\.)?({ARCHITECTURES[architecture].names.ignored})")
    rest = file.tensors.keys() - {part.key for own in parts.values() for part in own}
    if unused := sorted(key for key in rest if not ignored.fullmatch(key)):
        others = f" and {len(unused) - 1} more" if unused[1:] else ""
        raise ValueError(f"{path} has {unused[0]}{others}, which the plan's model lacks")
    sizes = {path.name: (path.stat().st_size, None)}
    return TensorSource(path.parent, tensors, sizes, {}, exact=False, opened=_opened)


def _box(path: Path, file: GgufFile, part: StoredPart) -> Box:
    """The part of a parameter that a stored tensor holds."""
    origin = tuple(start for start, _ in part.theirs)
    kind = file.tensors[part.key].tensor_type.name
    return Box(path.name, part.key, part.ours, kind, origin)


def permuted_rows(value: np.ndarray, key: str, shape: Shape, architecture: str) -> np.ndarray:
    """A tensor as a file of the architecture has it: rotary pairs of a head adjacent."""
    found = PERMUTED.fullmatch(key) if ARCHITECTURES[architecture].permuted else None
    if found is None:
        return value
    heads = shape.heads if found[1] == "q" else int(shape.kv_heads or shape.heads)
    pairs = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(pairs).reshape(value.shape)


def _extent(tensor: Any) -> tuple[int, ...]:
    """A tensor's shape; the format lists the innermost dim first."""
    return tuple(int(n) for n in reversed(tensor.shape))


def _opened(path: Path) -> AbstractContextManager[GgufWeights]:
    return nullcontext(GgufWeights(open_gguf(path, FIELD)))


class GgufWeights:
    """Dequantised tensors of a GGUF file, with the interface of `safetensors.safe_open`."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def position(self, key: str) -> int:
        """Where in the file a tensor begins, for reading in order."""
        return int(self.file.tensors[key].data_offset)

    def get_slice(self, key: str) -> DequantizedSlice:
        """A tensor of which only a slice is read."""
        return DequantizedSlice(self.file, key)

    def get_tensor(self, key: str) -> Tensor:
        """A complete tensor, fp32."""
        whole = self.get_slice(key)
        return whole[tuple(slice(0, n) for n in whole.get_shape())]


class DequantizedSlice:
    """A tensor of a GGUF file; indexing reads and dequantises what a slice needs."""

    def __init__(self, file: GgufFile, key: str) -> None:
        self.path, self.key, self.tensor = file.path, key, file.tensors[key]
        architecture = file.get("general.architecture")
        known = ARCHITECTURES.get(architecture)
        found = PERMUTED.fullmatch(key) if known and known.permuted else None
        self.permuted_heads: int | None = None
        if found:
            heads = file.get(f"{architecture}.attention.head_count")
            groups = file.get(f"{architecture}.attention.head_count_kv", heads)
            self.permuted_heads = heads if found[1] == "q" else groups

    def get_shape(self) -> list[int]:
        """The tensor's shape."""
        return list(_extent(self.tensor))

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        """The slice, dequantised to fp32.

        Raises:
            ValueError: `gguf` cannot dequantise the tensor's type.
        """
        from gguf import GGML_QUANT_SIZES, dequantize

        kind, last = self.tensor.tensor_type, slices[-1]
        data = self._read(slices)
        if len(slices) == 1 and self.permuted_heads:
            last = slice(0, last.stop - last.start)
        # Quantised rows are bytes, in blocks of which each is dequantised alone.
        block, size = GGML_QUANT_SIZES[kind] if data.dtype == np.uint8 else (1, 1)
        first = last.start // block
        part = data[..., first * size : -(-last.stop // block) * size]
        try:
            values = dequantize(np.ascontiguousarray(part), kind)
        except NotImplementedError:
            raise ValueError(
                f"{self.path}: {self.key} is {kind.name}, which the package gguf cannot "
                "dequantise; get the model in another quantisation, such as Q8_0"
            ) from None
        values = values[..., last.start - first * block : last.stop - first * block]
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))

    def _read(self, slices: tuple[slice, ...]) -> np.ndarray:
        """Stored rows that hold `slices`, of which the last dim is complete.

        They are not mapped into memory, where each page would count until the file is closed.
        """
        stored, first, lead = self.tensor.data, 0, 0
        while lead + 2 < len(slices) and slices[lead].stop - slices[lead].start == 1:
            first += slices[lead].start * math.prod(stored.shape[lead + 1 :])
            lead += 1
        if len(slices) == 1 and self.permuted_heads is None:
            return self._from_file(0, stored.shape)
        inner = stored.shape[lead + 1 :]
        rows = self._rows(slices[lead])
        begin, end = int(rows.min()), int(rows.max()) + 1
        found = self._from_file(first + begin * math.prod(inner), (end - begin, *inner))
        found = found[rows - begin] if self.permuted_heads else found
        found = found[(slice(None), *slices[lead + 1 : -1])]
        return found.reshape([1] * lead + list(found.shape))

    def _from_file(self, first: int, shape: tuple[int, ...]) -> np.ndarray:
        """Stored values from the tensor's `first` on."""
        kind, count = self.tensor.data.dtype, math.prod(shape)
        offset = int(self.tensor.data_offset) + first * kind.itemsize
        found = np.fromfile(self.path, kind, count, offset=offset)
        if found.size != count:
            raise ValueError(f"{self.path}: {self.key} is cut short; get the file again")
        return found.reshape(shape)

    def _rows(self, rows: slice) -> np.ndarray:
        """Rows of the file that hold `rows`."""
        row = np.arange(rows.start, rows.stop)
        if self.permuted_heads is None:
            return row
        head = self.get_shape()[0] // self.permuted_heads
        half, index = np.divmod(row % head, head // 2)
        return np.asarray(row - row % head + 2 * index + half)
