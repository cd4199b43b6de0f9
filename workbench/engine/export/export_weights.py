"""Export of a checkpoint's parameters as Hugging Face safetensors.

`python -m workbench.engine.export.export_weights CHECKPOINT --to FOLDER` prints its progress as
JSON lines, the answer last. Tensors are read and written one at a time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.checkpoint import read_tensors, safetensors_writer, tensor_integrity
from workbench.checkpoint.checkpoint_format import Shard, Slices, write_atomically
from workbench.checkpoint.huggingface.huggingface_names import parameter_shapes, stored_parts
from workbench.checkpoint.resume_point import CONFIG
from workbench.checkpoint.safetensors_writer import TORCH_DTYPES, TensorEntry
from workbench.checkpoint.tensor_index import TensorSource
from workbench.engine.export.export_command import answered, as_json, export_parser
from workbench.engine.export.exported_tokenizer import (
    given_tokenizer,
    run_tokenizer,
    write_tokenizer,
)
from workbench.engine.export.exported_weights import ExportedWeights, weights_to_export
from workbench.engine.export.new_folder import check_new_folder, new_folder
from workbench.plan.catalog.families.stored_parts import StoredPart, stored_extents
from workbench.plan.catalog.huggingface_files import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 5 * 10**9
"""Maximum size of a file; a larger tensor gets a file of its own."""
Progress = Callable[[int, int, str], None]


def export_checkpoint(
    checkpoint: Path,
    to: Path,
    progress: Progress = lambda done, of, what: None,
    shard_bytes: int = SHARD_BYTES,
    base: Path | None = None,
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """Write a checkpoint's parameters, unconverted, into a new folder; adapters merged into their
    base, W + s B A in fp32, rounded once to the base's dtype.

    Args:
        checkpoint: A checkpoint, or a folder of adapters in PEFT's format.
        to: The folder, which appears when all is written.
        progress: Called with (bytes done, bytes in all, current step); bytes are those read to
            verify and those written.
        shard_bytes: Maximum size of a file.
        base: The weights that adapters are merged into; None: those that the run says.
        tokenizer: What is written beside them; None: the base's, or the run's own.

    Returns:
        Files, tensors, parameters, bytes and dtype written.

    Raises:
        ValueError: The checkpoint is damaged, no family's names express the model, or `to`
            exists or cannot be written.
    """
    weights = weights_to_export(checkpoint, base)
    stored = _stored_tensors(weights)
    check_new_folder(to)
    beside = None if tokenizer is None else given_tokenizer(tokenizer)
    if beside is None and weights.base is None:
        beside = run_tokenizer(checkpoint, weights.shape.vocab)
    total = weights.checked_bytes + sum(tensor.entry.nbytes for tensor in stored)
    count = ByteCounter(total, progress)
    count.what = "checking weights"
    weights.check(count)
    with new_folder(to) as writing:
        answer = _write(weights, stored, writing, count, shard_bytes)
        weights.copy_tokenizer(writing)
        if beside is not None:
            write_tokenizer(beside, writing, weights.shape.vocab)
    return {"folder": str(to), **answer}


class ByteCounter:
    """Adds up bytes and reports them."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.done, self.total, self.progress, self.what = 0, total, progress, ""

    def __call__(self, nbytes: int) -> None:
        self.done += nbytes
        self.progress(min(self.done, self.total), self.total, self.what)


def check_files(source: TensorSource, count: ByteCounter) -> None:
    """Verify the checksums of all files. Raises ValueError naming one that is damaged."""
    for file in source.files:
        count.what = f"checking {file}"
        tensor_integrity.verify_file(source, file, count)


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor to write, and the shards that it is made of; they have no storage yet."""

    entry: TensorEntry
    parts: list[tuple[StoredPart, Shard]]


def _stored_tensors(weights: ExportedWeights) -> list[_StoredTensor]:
    """The family's tensors, in the order of the model's parameters."""
    source, shape = weights.source, weights.shape
    extents, parts = parameter_shapes(shape), stored_parts(weights.family, shape)
    of_key: dict[str, list[tuple[StoredPart, Shard]]] = {}
    for name, own in parts.items():
        for part in own:
            shard = shard_of(source, name, extents[name], part.ours)
            of_key.setdefault(part.key, []).append((part, shard))
    sizes = stored_extents(parts)
    return [
        _StoredTensor(TensorEntry(key, found[0][1].tensor.dtype, sizes[key]), found)
        for key, found in of_key.items()
    ]


def shard_of(
    source: TensorSource, name: str, shape: tuple[int, ...], slices: Slices, device: str = "meta"
) -> Shard:
    """A box of an unsharded parameter as a shard to load, in its dtype, of a quantised one in fp32;
    on 'meta' it has no storage yet.
    """
    stored = source.tensors.get((name, "parameter"))
    dtype = TORCH_DTYPES.get(stored.boxes[0].dtype, torch.float32) if stored else torch.float32
    extent = [stop - start for start, stop in slices]
    return Shard(name, "parameter", torch.empty(extent, dtype=dtype, device=device), shape, slices)


def _write(
    weights: ExportedWeights,
    stored: list[_StoredTensor],
    folder: Path,
    count: ByteCounter,
    shard_bytes: int,
) -> dict[str, Any]:
    by_key = {tensor.entry.key: tensor for tensor in stored}
    boxes = {
        (shard.name, shard.slices): read_tensors.overlapping_boxes(weights.source, shard)
        for tensor in stored
        for _, shard in tensor.parts
    }

    def read(key: str) -> Tensor:
        count.what = f"writing {key}"
        entry = by_key[key].entry
        made = torch.zeros(entry.shape, dtype=entry.dtype)
        for part, shard in by_key[key].parts:
            found = weights.read(shard, boxes[shard.name, shard.slices])
            value = found.transpose(-1, -2) if part.transposed else found
            theirs = made[tuple(slice(*its) for its in part.theirs)]
            theirs.copy_(value.reshape(theirs.shape))
        return made

    entries = [tensor.entry for tensor in stored]
    groups = list(_grouped(entries, shard_bytes))
    files = [
        SINGLE_FILE if len(groups) == 1 else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        for i in range(len(groups))
    ]
    for file, group in zip(files, groups):
        safetensors_writer.write_safetensors(folder / file, group, read, count)
    nbytes, numbers = (
        sum(entry.nbytes for entry in entries),
        sum(shard.tensor.numel() for tensor in stored for _, shard in tensor.parts),
    )
    if len(groups) > 1:
        place = {entry.key: file for file, group in zip(files, groups) for entry in group}
        index = {
            "metadata": {"total_size": nbytes, "total_parameters": numbers},
            "weight_map": dict(sorted(place.items())),
        }
        write_atomically(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")
    dtype = entries[0].dtype
    write_atomically(folder / CONFIG, json.dumps(weights.config(dtype), indent=2) + "\n")
    return {
        "files": files,
        "tensors": len(entries),
        "parameters": numbers,
        "bytes": nbytes,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _grouped(entries: list[TensorEntry], most: int) -> Iterator[list[TensorEntry]]:
    group: list[TensorEntry] = []
    for entry in entries:
        if group and sum(each.nbytes for each in group) + entry.nbytes > most:
            yield group
            group = []
        group.append(entry)
    yield group


def main() -> int:
    """Export; 2 with one line on stderr where it is refused."""
    parser = export_parser("export_weights")
    parser.add_argument("--tokenizer", type=Path)
    given = parser.parse_args()
    more = {"base": given.base, "tokenizer": given.tokenizer}
    return answered(lambda: export_checkpoint(given.checkpoint, given.to, as_json, **more))


if __name__ == "__main__":
    sys.exit(main())
