"""Loading of stored tensors into a rank's shards, resharding to any mesh.

A rank reads only the boxes that overlap with its own. Each file is verified once, by one of the
ranks that need it. An error of any rank is raised on all of them, so that none is left waiting in a
collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from workbench.checkpoint.checkpoint_format import Shard, Slices, num_entries
from workbench.checkpoint.manifest import REMEDY
from workbench.checkpoint.safetensors_writer import SAFETENSORS_DTYPES
from workbench.checkpoint.tensor_index import Box, TensorSource
from workbench.checkpoint.tensor_integrity import verify_files
from workbench.errors import PlanError, Problem

SETTINGS = (
    "set strategy.precision and training.optimizer to what it was written with, or start from its "
    "weights alone "
    "(`workbench weights`)"
)
T = TypeVar("T")
Progress = Callable[[int, int], None]
PART_NUMEL = 4 * 2**20
"""Values read at once: up to 16 MiB beside the shards."""


@dataclass(frozen=True)
class LoadingRanks:
    """This rank among those that load together; `gather` all-gathers plain data by rank."""

    rank: int = 0
    gather: Callable[[Any], list[Any]] = lambda item: [item]


def load_shards(
    source: TensorSource,
    wanted: Sequence[Shard],
    ranks: LoadingRanks | None = None,
    progress: Progress = lambda done, of: None,
    located: Sequence[Shard] = (),
) -> None:
    """Copy stored values into shards, in place, from whatever mesh wrote them.

    Checksums of all files that are read, and all names, shapes and dtypes, are verified before
    anything is copied. Of a file without checksum each rank checks that what it copies is finite:
    every byte is read once, and after an error the shards hold no weights of use.

    Args:
        source: The index of the stored tensors.
        wanted: This rank's shards.
        ranks: The ranks that load together; None for a single one.
        progress: Called with the bytes done and in all of this rank: of files that it verifies, of
            its shards, and of `located`.
        located: Boxes that are verified alike and copied by a `SliceReader` afterwards.

    Raises:
        PlanError: On all ranks; names the file or tensor, and the remedy.
    """
    ranks = ranks or LoadingRanks()
    both = raise_on_all_ranks(ranks, lambda: locate_boxes(source, [*wanted, *located]))
    found = both[: len(wanted)]
    needs = ranks.gather(sorted({box.file for _, boxes in both for box in boxes}))
    own = assign_files(needs, {file: size for file, (size, _) in source.files.items()})[ranks.rank]
    hashed = sum(size for size, sha256 in map(source.files.__getitem__, own) if sha256)
    total, done = hashed + sum(shard.tensor.nbytes for shard in (*wanted, *located)), 0

    def read(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    raise_on_all_ranks(ranks, partial(verify_files, source, own, read))
    raise_on_all_ranks(ranks, lambda: copy_boxes(source, found, read))


class SliceReader:
    """Reads slices of parameters one after another, whose files `load_shards` has verified; a
    context, within which files stay open.

    Args:
        source: The index of the stored tensors.
        read: Called with the bytes of each part.
    """

    def __init__(self, source: TensorSource, read: Callable[[int], None]) -> None:
        self._source, self._read, self._files = source, read, ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.clear()
        self._files.close()

    def __call__(self, into: Tensor, name: str, shape: tuple[int, ...], slices: Slices) -> None:
        """Fill `into` with what `slices` says of the parameter `name`.

        Raises:
            ValueError: The stored tensor is another, or its file damaged.
        """
        shard = Shard(name, "parameter", into, shape, slices)
        for box in overlapping_boxes(self._source, shard):
            if box.file not in self._open:
                path = self._source.folder / box.file
                self._open[box.file] = self._files.enter_context(self._source.opened(path))
            common = intersect(box.slices, slices)
            _copy(self._source, self._open[box.file], box, common, [shard], self._read)


def raise_on_all_ranks(ranks: LoadingRanks, work: Callable[[], T]) -> T:
    """The result of `work`; an error of any rank is raised on all of them.

    Raises:
        PlanError: The first failing rank's message.
    """
    result, said = None, None
    try:
        result = work()
    except (ValueError, OSError) as error:
        said = str(error)
    for words in ranks.gather(said):
        if words is not None:
            # The message says all: the files are at fault, not the code.
            raise PlanError(Problem("", words))
    return result  # type: ignore[return-value]


def assign_files(needs: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> list[list[str]]:
    """Files that each rank verifies: every file once, balanced by bytes.

    Args:
        needs: Files that each rank reads.
        sizes: Bytes of each file.

    Returns:
        Per rank a list of files among those that it reads.
    """
    own: list[list[str]] = [[] for _ in needs]
    load = [0] * len(needs)
    for file in sorted(
        {file for files in needs for file in files}, key=lambda file: (-sizes[file], file)
    ):
        rank = min(
            (rank for rank, files in enumerate(needs) if file in files), key=lambda rank: load[rank]
        )
        own[rank].append(file)
        load[rank] += sizes[file]
    return own


def locate_boxes(source: TensorSource, wanted: Sequence[Shard]) -> list[tuple[Shard, list[Box]]]:
    """(shard, boxes to read it from) for each shard.

    Raises:
        ValueError: The stored tensors are not those that the plan needs.
    """
    found = [(shard, overlapping_boxes(source, shard)) for shard in wanted]
    unwanted = {kind for _, kind in source.tensors} - {"step", *(shard.kind for shard in wanted)}
    if source.exact and wanted and unwanted:
        raise ValueError(
            f"{source.folder} holds {', '.join(sorted(unwanted))} of its parameters, which the "
            f"plan has not; {SETTINGS}"
        )
    return found


def overlapping_boxes(source: TensorSource, shard: Shard) -> list[Box]:
    """Stored boxes that overlap with a shard.

    Raises:
        ValueError: They do not cover it, or have another shape or dtype.
    """
    folder, what = source.folder, f"{shard.kind} of {shard.name}"
    stored = source.tensors.get((shard.name, shard.kind))
    if stored is None:
        raise ValueError(f"{folder} has no {what}: it is of another model, or {SETTINGS}")
    if stored.shape != shard.shape:
        raise ValueError(
            f"{folder}: {what} has shape {stored.shape}, the plan's model needs {shard.shape}; "
            "load it with the plan that wrote it, or change the model's shape"
        )
    boxes = [box for box in stored.boxes if num_entries(intersect(box.slices, shard.slices))]
    covered = sum(num_entries(intersect(box.slices, shard.slices)) for box in boxes)
    if covered != num_entries(shard.slices):
        raise ValueError(
            f"{folder}: {what} has {covered} of the {num_entries(shard.slices)} values wanted; "
            f"{REMEDY}"
        )
    for box in boxes:
        needed = SAFETENSORS_DTYPES[shard.tensor.dtype]
        if source.exact and box.dtype != needed:
            raise ValueError(
                f"{folder}: {what} is {box.dtype}, the plan needs {needed}; {SETTINGS}"
            )
    return boxes


def intersect(a: Slices, b: Slices) -> Slices:
    """Intersection of two boxes of one tensor; may be empty."""
    return tuple((max(s, t), max(max(s, t), min(e, f))) for (s, e), (t, f) in zip(a, b))


def copy_boxes(
    source: TensorSource,
    found: Sequence[tuple[Shard, Sequence[Box]]],
    read: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Copy the stored boxes into the shards that overlap with them, in the order of the files.

    A box that several shards want, as a parameter and its master weight do, is read once.

    Args:
        source: The index.
        found: Shards, and the boxes to read them from.
        read: Called with the bytes of each part of a shard.

    Raises:
        ValueError: A file is damaged, or a value of one without checksum is NaN or infinite.
    """
    targets: dict[tuple[Box, Slices], list[Shard]] = {}
    for shard, boxes in found:
        for box in boxes:
            common = intersect(box.slices, shard.slices)
            targets.setdefault((box, common), []).append(shard)
    by_file: dict[str, list[tuple[Box, Slices]]] = {}
    for box, common in targets:
        by_file.setdefault(box.file, []).append((box, common))
    for name in sorted(by_file):
        with source.opened(source.folder / name) as file:
            wanted = sorted(by_file[name], key=lambda each: file.position(each[0].key))
            for box, common in wanted:
                _copy(source, file, box, common, targets[box, common], read)


def _copy(
    source: TensorSource,
    file: Any,
    box: Box,
    common: Slices,
    shards: Sequence[Shard],
    read: Callable[[int], None],
) -> None:
    """Copy what `common` says of a global tensor from a box into shards, part by part."""
    extent = [stop - start for start, stop in box.slices]
    stored, path = file.get_slice(box.key), source.folder / box.file
    if box.origin is None and (has := stored.get_shape()) != extent:
        raise ValueError(f"{path}: {box.key} has shape {has}, its manifest says {extent}; {REMEDY}")
    origin = (0,) * len(extent) if box.origin is None else box.origin
    lacking = len(extent) - len(origin)
    theirs = [(s - first, e - first) for (s, e), (first, _) in zip(common, box.slices)][lacking:]
    theirs = theirs[::-1] if box.transposed else theirs
    wanted = tuple(slice(o + s, o + e) for o, (s, e) in zip(origin, theirs))
    targets = [_target(shard, common, lacking, box.transposed) for shard in shards]
    unchecked = source.files[box.file][1] is None
    for part in _parts(wanted, stored.get_shape()):
        values = stored[part]
        if unchecked:
            _refuse_non_finite(values, part, f"{path}: {box.key}")
        for target in targets:
            into = tuple(slice(p.start - w.start, p.stop - w.start) for p, w in zip(part, wanted))
            target[into].copy_(values)
            read(values.numel() * target.itemsize)


def _target(shard: Shard, common: Slices, lacking: int, transposed: bool) -> Tensor:
    """What `common` says of a shard, with the dims of the stored tensor."""
    ours = (slice(s - first, e - first) for (s, e), (first, _) in zip(common, shard.slices))
    target = shard.tensor.detach()[tuple(ours)]
    for _ in range(lacking):
        target = target[0]  # of one expert, which has a stored tensor of its own
    return target.transpose(-1, -2) if transposed else target


def _parts(wanted: tuple[slice, ...], shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """`wanted` in parts, in the order of the file, whose complete rows have `PART_NUMEL` values."""
    if not wanted:
        yield ()
        return
    (first, *rest), row = wanted, math.prod(shape[1:])
    at = first.start
    while at < first.stop:
        if rest and row > PART_NUMEL:
            for part in _parts(tuple(rest), shape[1:]):
                yield slice(at, at + 1), *part
            at += 1
            continue
        stop = min(first.stop, at + max(1, PART_NUMEL // max(1, row)))
        yield slice(at, stop), *rest
        at = stop


def _refuse_non_finite(values: Tensor, part: tuple[slice, ...], what: str) -> None:
    """Refuse NaN and infinities, naming the first; both extremes are finite without."""
    low, high = values.aminmax()
    if bool(low.isfinite() & high.isfinite()):
        return
    place = (~values.isfinite()).nonzero()[0].tolist()
    value = float(values[tuple(place)])
    at = [each.start + index for each, index in zip(part, place)]
    raise ValueError(f"{what} is {value} at {at}; get intact weights")
