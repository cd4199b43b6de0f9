"""`python -m workbench.engine.export_weights CHECKPOINT --to FOLDER`: its parameters under Hugging
Face's names.

Tensors are read and written one at a time. Prints a line of JSON as it goes on, and the answer as
the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.checkpoint import read_tensors, safetensors_writer, tensor_integrity
from workbench.checkpoint.checkpoint_format import Shard, write_whole
from workbench.checkpoint.huggingface_folder import refuse_inexpressible
from workbench.checkpoint.huggingface_names import (
    INDEX,
    WHOLE,
    config_of,
    foreign_name,
    parameters_of,
)
from workbench.checkpoint.resume_point import CONFIG, shape_of
from workbench.checkpoint.safetensors_writer import DTYPES, Entry
from workbench.checkpoint.tensor_index import Source, source_of
from workbench.engine.exit_codes import status
from workbench.errors import refuse
from workbench.plan.model_shape import Shape

SHARD_BYTES = 5 * 10**9
"""A larger model is spread over files of at most this size; a larger tensor stands alone."""
Progress = Callable[[int, int, str], None]


def export(
    checkpoint: Path,
    to: Path,
    progress: Progress = lambda done, of, what: None,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
    """Write the parameters of a checkpoint into the new folder `to`, to the bit and in their own
    dtype.

    `progress(done, of, what)` counts bytes, read to verify and written. Returns what was written.
    Raises ValueError where the checkpoint is damaged, the model is none that Llama's names can
    express, or `to` is there or unwritable.
    """
    source = source_of(checkpoint)
    shape = shape_of(checkpoint, dict(source.meta))
    refuse_inexpressible(shape)
    shards = {
        foreign_name(name): _wanted(source, name, extent)
        for name, extent in parameters_of(shape).items()
    }
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise refuse("--to", f"'{to}' is there already; legal: a new folder, or an empty one")
    total = sum(size for size, _ in source.files.values()) + sum(
        _entry(*item).nbytes for item in shards.items()
    )
    count = _Count(total, progress)
    for file in source.files:
        count.what = f"checking {file}"
        tensor_integrity.verify(source, file, count)
    writing = to.with_name(f".{to.name}.writing-{os.getpid()}")
    try:
        writing.mkdir(parents=True)
        answer = _write(source, shape, shards, writing, count, shard_bytes)
        if to.exists():
            to.rmdir()
        writing.rename(to)
    except OSError as error:
        raise refuse(
            "--to",
            f"'{to}' cannot be written: {error.strerror or error}; free space there, or take "
            f"another "
            "folder",
        ) from None
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return {"folder": str(to), **answer}


class _Count:
    """Adds up bytes and tells of them."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.done, self.total, self.progress, self.what = 0, total, progress, ""

    def __call__(self, nbytes: int) -> None:
        self.done += nbytes
        self.progress(min(self.done, self.total), self.total, self.what)


def _wanted(source: Source, name: str, shape: tuple[int, ...]) -> Shard:
    """The whole parameter as something to be loaded; it has no storage yet."""
    stored = source.tensors.get((name, "parameter"))
    dtype = DTYPES[stored.boxes[0].dtype] if stored else torch.float32
    return Shard(
        name,
        "parameter",
        torch.empty(shape, dtype=dtype, device="meta"),
        shape,
        tuple((0, n) for n in shape),
    )


def _entry(key: str, shard: Shard) -> Entry:
    return Entry(key, shard.tensor.dtype, shard.shape)


def _write(
    source: Source,
    shape: Shape,
    shards: dict[str, Shard],
    folder: Path,
    count: _Count,
    shard_bytes: int,
) -> dict[str, Any]:
    def read(key: str) -> Tensor:
        count.what = f"writing {key}"
        wanted = shards[key]
        target = Shard(
            wanted.name,
            wanted.kind,
            torch.empty_like(wanted.tensor, device="cpu"),
            wanted.shape,
            wanted.slices,
        )
        read_tensors.copy_all(source, [(target, boxes[key])])
        return target.tensor

    boxes = {key: read_tensors.overlapping(source, shard) for key, shard in shards.items()}
    entries = [_entry(key, shard) for key, shard in shards.items()]
    groups = list(_grouped(entries, shard_bytes))
    files = [
        WHOLE if len(groups) == 1 else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        for i in range(len(groups))
    ]
    for file, group in zip(files, groups):
        safetensors_writer.write(folder / file, group, read, count)
    nbytes, numbers = (
        sum(entry.nbytes for entry in entries),
        sum(shard.tensor.numel() for shard in shards.values()),
    )
    if len(groups) > 1:
        place = {entry.key: file for file, group in zip(files, groups) for entry in group}
        index = {
            "metadata": {"total_size": nbytes, "total_parameters": numbers},
            "weight_map": dict(sorted(place.items())),
        }
        write_whole(folder / INDEX, json.dumps(index, indent=2) + "\n")
    dtype = entries[0].dtype
    write_whole(folder / CONFIG, json.dumps(config_of(shape, dtype), indent=2) + "\n")
    return {
        "files": files,
        "tensors": len(entries),
        "parameters": numbers,
        "bytes": nbytes,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _grouped(entries: list[Entry], most: int) -> Iterator[list[Entry]]:
    group: list[Entry] = []
    for entry in entries:
        if group and sum(each.nbytes for each in group) + entry.nbytes > most:
            yield group
            group = []
        group.append(entry)
    yield group


def main() -> int:
    """Export; 2 with one line on stderr where it is refused."""
    parser = argparse.ArgumentParser(prog="python -m workbench.engine.export_weights")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    def progress(done: int, of: int, what: str) -> None:
        print(json.dumps({"done": done, "of": of, "what": what}), flush=True)

    return status(
        lambda: print(json.dumps(export(arguments.checkpoint, arguments.to, progress)), flush=True)
    )


if __name__ == "__main__":
    sys.exit(main())
