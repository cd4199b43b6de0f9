"""Format of a distributed checkpoint: a safetensors file per rank, and a manifest written last.

Every stored tensor records which box of which global tensor it is, so a checkpoint loads on any
mesh. A folder without manifest is not a checkpoint; a folder gets its name only when complete.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.checkpoint import safetensors_writer
from workbench.checkpoint.manifest import FINITE, MANIFEST, VERSION, is_finite, manifest_text
from workbench.checkpoint.resume_point import finished_checkpoints
from workbench.checkpoint.safetensors_writer import SAFETENSORS_DTYPES, TensorEntry

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

CHECK_ENTRIES = 2**20
"""Entries checked for NaN and infinity at once."""
BF16_EXPONENT = 0x7F80
"""Exponent bits of a bf16, all set in NaN and infinities."""
Slices = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Shard:
    """A local tensor and its box of the global tensor.

    `slices` are [start, stop) of the global `shape`, one pair per dim; `tensor` has their extent
    exactly, without padding. `kind` is parameter, moment1, moment2, master, step, or
    gradient of a delayed update.
    """

    name: str
    kind: str
    tensor: Tensor
    shape: tuple[int, ...]
    slices: Slices


def checkpoint_path(folder: Path, step: int) -> Path:
    """Path of the checkpoint of `step` in the folder of checkpoints."""
    return folder / f"step-{step:08d}"


def num_entries(slices: Iterable[tuple[int, int]]) -> int:
    """Number of entries of a box."""
    return math.prod(stop - start for start, stop in slices)


def rank_index_path(folder: Path, rank: int) -> Path:
    """Path of a rank's index, which is written after its tensors."""
    return folder / f"rank{rank:05d}.json"


def write_rank_file(
    folder: Path, rank: int, shards: Sequence[Shard], wrote: Callable[[int], None]
) -> None:
    """Write this rank's shards, then its index, which is empty for a rank without shards.

    Args:
        folder: The folder of the checkpoint being written.
        rank: This rank.
        shards: Its shards, one file.
        wrote: Called with the bytes of each block.

    Raises:
        OSError: The disk refuses.
    """
    entries: list[dict[str, Any]] = []
    if shards:
        path = folder / f"rank{rank:05d}.safetensors"
        held = dict(zip(_keys(shards), shards))
        described = [
            TensorEntry(key, s.tensor.dtype, tuple(s.tensor.shape)) for key, s in held.items()
        ]
        size, sha256 = safetensors_writer.write_safetensors(
            path, described, lambda key: held[key].tensor, wrote
        )
        tensors = [_described(key, shard) for key, shard in held.items()]
        finite = all(_finite(shard.tensor) for shard in shards)
        entries = [
            {
                "file": path.name,
                "bytes": size,
                "sha256": sha256,
                "tensors": tensors,
                "finite": finite,
            }
        ]
    write_atomically(rank_index_path(folder, rank), json.dumps(entries))


def _finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite.

    CPU tensors are checked by numpy, outside of torch's allocator, whose count is the training's.
    """
    if tensor.is_cuda:
        return all(bool(part.isfinite().all()) for part in tensor.flatten().split(CHECK_ENTRIES))
    values = tensor.detach()
    bits = values.dtype == torch.bfloat16  # which numpy does not know
    array = np.atleast_1d((values.view(torch.int16) if bits else values).numpy())
    for part in np.array_split(array, -(-array.size // CHECK_ENTRIES)) if array.size else ():
        if ((part & BF16_EXPONENT) == BF16_EXPONENT).any() if bits else not np.isfinite(part).all():
            return False
    return True


def delete_rank_files(folder: Path, rank: int) -> None:
    """Delete this rank's files of a checkpoint that cannot be written, if the disk allows."""
    for path in folder.glob(f"*rank{rank:05d}.*"):
        with suppress(OSError):
            path.unlink()


def _keys(shards: Sequence[Shard]) -> list[str]:
    """Names of the shards in their file: KIND/NAME, numbered where a tensor has several boxes."""
    count: Counter[str] = Counter()
    keys = []
    for shard in shards:
        key = f"{shard.kind}/{shard.name}"
        keys.append(f"{key}#{count[key]}" if count[key] else key)
        count[key] += 1
    return keys


def _described(key: str, shard: Shard) -> dict[str, Any]:
    extent = tuple(stop - start for start, stop in shard.slices)
    assert tuple(shard.tensor.shape) == extent, (
        shard.name,
        shard.kind,
        tuple(shard.tensor.shape),
        extent,
    )
    return {
        "key": key,
        "name": shard.name,
        "kind": shard.kind,
        "dtype": SAFETENSORS_DTYPES[shard.tensor.dtype],
        "shape": shard.shape,
        "slices": shard.slices,
    }


def commit_checkpoint(writing: Path, final: Path, world_size: int, meta: dict[str, Any]) -> None:
    """Merge the ranks' indexes into the manifest, and rename the folder.

    The order makes the commit atomic: the manifest is synced before the folder gets its name, and
    an older checkpoint of that name is moved aside only then.

    Args:
        writing: The folder that the ranks have written.
        final: Its name as a checkpoint.
        world_size: Number of ranks.
        meta: The manifest's `meta`.
    """
    indexes = [rank_index_path(writing, rank) for rank in range(world_size)]
    files = [entry for path in indexes for entry in json.loads(path.read_text())]
    _assert_whole(files)
    finite = [entry.pop("finite") for entry in files]
    meta = meta if all(finite) else {**meta, FINITE: False}
    write_atomically(
        writing / MANIFEST, manifest_text({"version": VERSION, "meta": meta, "files": files})
    )
    for path in writing.iterdir():
        if path.name != MANIFEST and path.suffix != ".safetensors":
            path.unlink()
    fsync_folder(writing)
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        final.rename(replaced)
    writing.rename(final)
    fsync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def prune_checkpoints(folder: Path, keep: int, latest: Path) -> None:
    """Delete old checkpoints: `latest` and the `keep` - 1 highest other steps stay.

    The last one without NaN or infinity stays too, because training can resume from it.
    """
    others = [path for path in finished_checkpoints(folder) if path != latest]
    good = [path for path in [*others, latest] if is_finite(path)]
    for old in others[: len(others) - (keep - 1)] if len(others) >= keep else ():
        if old in good[-1:]:
            continue
        shutil.rmtree(old, ignore_errors=True)


def _assert_whole(files: list[dict[str, Any]]) -> None:
    """Assert that the ranks' boxes cover every global tensor exactly once."""
    held: dict[tuple[str, str], int] = {}
    total: dict[tuple[str, str], int] = {}
    for tensor in (tensor for entry in files for tensor in entry["tensors"]):
        key = tensor["name"], tensor["kind"]
        held[key] = held.get(key, 0) + num_entries(tensor["slices"])
        total[key] = math.prod(tensor["shape"])
    assert held == total, {key: (held[key], total[key]) for key in held if held[key] != total[key]}


def write_atomically(path: Path, text: str) -> None:
    """Write a small file atomically: it gets its name only when it is on the disk."""
    draft = path.with_name(f".{path.name}")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


def fsync_folder(path: Path) -> None:
    """Sync a folder, so that renames in it survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
