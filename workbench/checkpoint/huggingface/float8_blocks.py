"""Weights in fp8 with one scale for each block of rows and columns (DeepSeek-V3, arXiv 2412.19437,
3.3), dequantised slice by slice as they are read.

A weight's scales are a tensor beside it, `<weight>_scale_inv` [rows / block, columns / block],
rounded up: a value is its 8 bits times its block's scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workbench.checkpoint.safetensors_reader import SafetensorsFile, SafetensorsSlice
from workbench.checkpoint.safetensors_writer import TORCH_DTYPES
from workbench.checkpoint.tensor_index import Box

FLOAT8 = "F8_E4M3"
SCALES = "_scale_inv"
"""End of the name of a weight's scales."""
Blocks = tuple[int, int]
"""Rows and columns that have a scale together."""


def scales_of(folder: Path, found: Mapping[str, Box], blocks: Blocks | None) -> dict[str, Box]:
    """Key of each weight in fp8 -> where its scales are.

    Args:
        folder: The folder, for messages.
        found: All tensors by key.
        blocks: What its configuration says; None: nothing.

    Raises:
        ValueError: A weight in fp8 has no scales, or they are not one for each block.
    """
    scales = {}
    for key, box in found.items():
        if box.dtype != FLOAT8:
            continue
        own, what = found.get(key + SCALES), f"{folder / box.file}: {box.key}"
        if blocks is None or own is None:
            lacks = "no quantization_config with a weight_block_size"
            lacks = lacks if own else f"no {key}{SCALES}"
            raise ValueError(
                f"{what} is {FLOAT8}, and {folder} has {lacks}; get the complete model"
            )
        extent, has = (tuple(stop for _, stop in it.slices) for it in (box, own))
        needed = tuple(-(-n // block) for n, block in zip(extent, blocks))
        if len(extent) != 2 or has != needed or own.dtype not in TORCH_DTYPES:
            raise ValueError(
                f"{folder / own.file}: {own.key} is {own.dtype} {list(has)}, and scales of "
                f"{list(extent)} in blocks of {list(blocks)} are F32 {list(needed)}; get the file "
                "again"
            )
        scales[box.key] = own
    return scales


class Float8Blocks:
    """Opens files of a folder, of which some weights have scales.

    Args:
        folder: Of all files.
        blocks: Rows and columns of a block.
        scales: Key of a weight in fp8 -> where its scales are, maybe in another file.
    """

    def __init__(self, folder: Path, blocks: Blocks, scales: Mapping[str, Box]) -> None:
        self.folder, self.blocks, self.scales = folder, blocks, scales

    def __call__(self, path: Path) -> Float8File:
        """The open file."""
        return Float8File(path, self)

    def read(self, box: Box, file: SafetensorsFile) -> Tensor:
        """Scales [rows / block, columns / block] in fp32, mostly of the file that is open."""
        path = self.folder / box.file
        if path == file.path:
            return file.get_tensor(box.key).float()
        with SafetensorsFile(path) as other:
            return other.get_tensor(box.key).float()


class Float8File(SafetensorsFile):
    """An open file whose weights in fp8 are read as fp32."""

    def __init__(self, path: Path, folder: Float8Blocks) -> None:
        super().__init__(path)
        self.folder = folder

    def get_slice(self, key: str) -> SafetensorsSlice | Float8Slice:  # type: ignore[override]
        """A tensor of which only slices are read."""
        stored, box = super().get_slice(key), self.folder.scales.get(key)
        if box is None:
            return stored
        return Float8Slice(stored, self.folder.read(box, self), self.folder.blocks)


@dataclass(frozen=True)
class Float8Slice:
    """A weight in fp8; indexing reads and dequantises what a slice needs."""

    stored: SafetensorsSlice
    scales: Tensor
    blocks: Blocks

    def get_shape(self) -> list[int]:
        """The tensor's shape."""
        return self.stored.get_shape()

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        """The slice, in fp32."""
        rows, columns = (
            torch.arange(each.start, each.stop) // block for each, block in zip(slices, self.blocks)
        )
        return self.stored[slices].float().mul_(self.scales[rows[:, None], columns])
