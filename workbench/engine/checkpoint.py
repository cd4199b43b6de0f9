"""Checkpoints: one safetensors file per rank that holds slices nobody else holds, and a manifest written last.

Every stored tensor says which slice of which global tensor it is, so a checkpoint loads under any mesh. A folder
without its manifest does not count as a checkpoint; it appears under its name only when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

MANIFEST = "manifest.json"
STEP = re.compile(r"step-(\d{8})")
Slices = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Shard:
    """A local tensor and its place: `slices` are [start, stop) of the global `shape`, one pair a dim.

    `kind` is parameter, moment1, moment2, master or step. `tensor` has the slices' extent exactly (no padding).
    """

    name: str
    kind: str
    tensor: Tensor
    shape: tuple[int, ...]
    slices: Slices

    @property
    def key(self) -> str:
        """What the tensor is called in its file, where it is the only one of its name and kind there."""
        return f"{self.kind}/{self.name}"


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies in the folder of checkpoints."""
    return folder / f"step-{step:08d}"


def finished(folder: Path) -> list[Path]:
    """Checkpoints in the folder that are whole, oldest step first."""
    found = folder.glob("step-*") if folder.is_dir() else ()
    return sorted(path for path in found if STEP.fullmatch(path.name) and (path / MANIFEST).is_file())


def save(
    folder: Path,
    step: int,
    tensors: list[Shard],
    rank: int,
    writers: list[int],
    meta: dict[str, Any],
    barrier: Callable[[], None],
    keep: int = 2,
) -> Path:
    """Write `folder`/step-00000050 from all ranks; the `keep` latest checkpoints stay.

    Called by every rank; `writers` are the ranks that hold unique slices, and the first of them commits. `meta` is
    plain data (plan sha256, sample index, world) and comes back from `load` with `step`. Raises ValueError where the
    disk refuses; then no checkpoint appears, and the former ones stay.
    """
    final, lead = path_of(folder, step), writers[0]
    writing = final.with_name(f"{final.name}.writing")
    if rank == lead:
        shutil.rmtree(writing, ignore_errors=True)
        _attempt(writing, lambda: writing.mkdir(parents=True))
    barrier()
    if rank in writers:
        _attempt(writing, lambda: _write_rank(writing, rank, tensors))
    barrier()
    if rank == lead:
        _attempt(writing, lambda: _commit(writing, final, writers, {**meta, "step": step}))
        for old in finished(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    barrier()
    return final


def _attempt(path: Path, write: Callable[[], None]) -> None:
    try:
        write()
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"checkpoint: cannot write {path}: {error}; free space there, or save less often (checkpoint.every, "
            "checkpoint.keep)"
        ) from error


def _write_rank(folder: Path, rank: int, tensors: list[Shard]) -> None:
    """This rank's tensors, then its part of the index."""
    for shard in tensors:
        extent = tuple(stop - start for start, stop in shard.slices)
        assert tuple(shard.tensor.shape) == extent, (shard.name, shard.kind, tuple(shard.tensor.shape), extent)
    # Clones, because slices of one flat buffer share memory, which the format cannot say.
    keys = _keys(tensors)
    stored = {key: shard.tensor.detach().cpu().contiguous().clone() for key, shard in zip(keys, tensors)}
    path = folder / f"rank{rank:05d}.safetensors"
    save_file(stored, path)
    _sync(path)
    index = [
        {"key": key, "name": s.name, "kind": s.kind, "shape": s.shape, "slices": s.slices}
        for key, s in zip(keys, tensors)
    ]
    entry = {"file": path.name, "bytes": path.stat().st_size, "sha256": _sha256(path), "tensors": index}
    _write_text(folder / f"rank{rank:05d}.json", json.dumps(entry))


def _keys(tensors: list[Shard]) -> list[str]:
    """What the shards are called in their file: several of one name and kind (boxes of a flat piece) are numbered."""
    count: Counter[str] = Counter()
    keys = []
    for shard in tensors:
        keys.append(f"{shard.key}#{count[shard.key]}" if count[shard.key] else shard.key)
        count[shard.key] += 1
    return keys


def _commit(writing: Path, final: Path, writers: list[int], meta: dict[str, Any]) -> None:
    """Join the indexes into the manifest, and give the folder its name."""
    files = [json.loads((writing / f"rank{rank:05d}.json").read_text()) for rank in writers]
    _assert_whole(files)
    body = json.loads(json.dumps({"version": 1, "meta": meta, "files": files}))
    _write_text(writing / MANIFEST, json.dumps({**body, "sha256": _digest(body)}))
    for rank in writers:
        (writing / f"rank{rank:05d}.json").unlink()
    if final.exists():
        replaced = final.with_name(f"{final.name}.replaced")
        final.rename(replaced)
        writing.rename(final)
        shutil.rmtree(replaced)
    else:
        writing.rename(final)
    _sync(final.parent)


def _assert_whole(files: list[dict[str, Any]]) -> None:
    """Every global tensor is there, once: the slices that the writers hold add up to it."""
    held: dict[tuple[str, str], int] = {}
    total: dict[tuple[str, str], int] = {}
    for tensor in (tensor for entry in files for tensor in entry["tensors"]):
        key = tensor["name"], tensor["kind"]
        held[key] = held.get(key, 0) + _size(tensor["slices"])
        total[key] = math.prod(tensor["shape"])
    assert held == total, {key: (held[key], total[key]) for key in held if held[key] != total[key]}


def _size(slices: Iterable[tuple[int, int]]) -> int:
    return math.prod(stop - start for start, stop in slices)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


REMEDY = "take another checkpoint (checkpoint.load)"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: `meta`, and `files` with their tensors. ValueError where it is not whole."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        body = {key: value for key, value in manifest.items() if key != "sha256"}
        if manifest["sha256"] == _digest(body):
            return body
    except FileNotFoundError:
        raise ValueError(f"{folder} is not a finished checkpoint: it has no {MANIFEST}; {REMEDY}") from None
    except (OSError, ValueError, KeyError, AttributeError):
        pass
    raise ValueError(f"{path} is damaged: its content does not match its checksum; {REMEDY}")


def load(folder: Path, wanted: list[Shard]) -> dict[str, Any]:
    """Copy the checkpoint's values into `wanted`, in place, from whatever mesh wrote them; returns its `meta`.

    Checksums of all files that are read, and all names and shapes, are verified before anything is copied. Values
    are converted where the dtype differs. Raises ValueError naming the file or the tensor, and what to do.
    """
    body = read_manifest(folder)
    pieces = _pieces(body)
    sources = [(shard, _sources(folder, shard, pieces)) for shard in wanted]
    files = {file for _, found in sources for file, _, _ in found}
    for entry in body["files"]:
        if entry["file"] in files:
            _verify(folder / entry["file"], entry)
    with ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(folder / file, framework="pt")) for file in sorted(files)}
        for shard, found in sources:
            for file, key, slices in found:
                _copy(opened[file], key, shard, slices)
    return dict(body["meta"])


Pieces = dict[tuple[str, str], list[tuple[str, dict[str, Any]]]]


def _pieces(body: dict[str, Any]) -> Pieces:
    """(name, kind) -> the files that hold a slice of it, and their index entries."""
    pieces: Pieces = {}
    for entry in body["files"]:
        for tensor in entry["tensors"]:
            pieces.setdefault((tensor["name"], tensor["kind"]), []).append((entry["file"], tensor))
    return pieces


def _sources(folder: Path, shard: Shard, pieces: Pieces) -> list[tuple[str, str, Slices]]:
    """Files, and the keys and slices in them, that overlap with what is wanted."""
    found = pieces.get((shard.name, shard.kind))
    if found is None:
        raise ValueError(
            f"{folder} has no {shard.kind} of {shard.name}: it is of another model, optimizer or strategy.precision; "
            f"{REMEDY}"
        )
    saved = tuple(found[0][1]["shape"])
    if saved != shard.shape:
        raise ValueError(
            f"{folder}: {shard.kind} of {shard.name} has shape {saved}, the plan's model needs {shard.shape}; "
            "load it with the plan that wrote it, or change the model's shape"
        )
    overlapping, covered = [], 0
    for file, tensor in found:
        slices = tuple((start, stop) for start, stop in tensor["slices"])
        if size := _size(_overlap(slices, shard.slices)):
            overlapping.append((file, tensor.get("key", shard.key), slices))
            covered += size
    if covered != _size(shard.slices):
        raise ValueError(
            f"{folder}: {shard.kind} of {shard.name} has {covered} of the {_size(shard.slices)} values wanted; {REMEDY}"
        )
    return overlapping


def _overlap(a: Slices, b: Slices) -> Slices:
    """Common part of two slices of one tensor, empty where there is none."""
    return tuple((max(s, t), max(max(s, t), min(e, f))) for (s, e), (t, f) in zip(a, b))


def _verify(path: Path, entry: dict[str, Any]) -> None:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise ValueError(f"{path} is damaged: {size} bytes instead of {entry['bytes']}; {REMEDY}")
        if _sha256(path) != entry["sha256"]:
            raise ValueError(f"{path} is damaged: its content does not match its checksum; {REMEDY}")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {REMEDY}") from None


def _copy(file: Any, key: str, shard: Shard, slices: Slices) -> None:
    """Copy what the stored slice and the wanted one have in common."""
    if not shard.shape:
        shard.tensor.detach().copy_(file.get_tensor(key))
        return
    common = _overlap(slices, shard.slices)
    theirs = tuple(slice(s - first, e - first) for (s, e), (first, _) in zip(common, slices))
    ours = tuple(slice(s - first, e - first) for (s, e), (first, _) in zip(common, shard.slices))
    shard.tensor.detach()[ours].copy_(file.get_slice(key)[theirs])
