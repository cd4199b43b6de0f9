"""Loading of stored tensors into a rank's shards, resharding to any mesh.

A rank reads only the boxes that overlap with its own. Each file is verified once, by one of the
ranks that need it. An error of any rank is raised on all of them, so that none is left waiting in a
collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from safetensors import SafetensorError

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


@dataclass(frozen=True)
class LoadingRanks:
    """This rank among those that load together; `gather` all-gathers plain data by rank."""

    rank: int = 0
    gather: Callable[[Any], list[Any]] = lambda item: [item]


def load_shards(
    source: TensorSource, wanted: Sequence[Shard], ranks: LoadingRanks | None = None
) -> None:
    """Copy stored values into shards, in place, from whatever mesh wrote them.

    Checksums of all files that are read, and all names, shapes and dtypes, are verified before
    anything is copied.

    Args:
        source: The index of the stored tensors.
        wanted: This rank's shards.
        ranks: The ranks that load together; None for a single one.

    Raises:
        PlanError: On all ranks; names the file or tensor, and the remedy.
    """
    ranks = ranks or LoadingRanks()
    found = raise_on_all_ranks(ranks, lambda: locate_boxes(source, wanted))
    needs = ranks.gather(sorted({box.file for _, boxes in found for box in boxes}))
    own = assign_files(needs, {file: size for file, (size, _) in source.files.items()})[ranks.rank]
    raise_on_all_ranks(ranks, partial(verify_files, source, own))
    raise_on_all_ranks(ranks, lambda: copy_boxes(source, found))


def raise_on_all_ranks(ranks: LoadingRanks, work: Callable[[], T]) -> T:
    """The result of `work`; an error of any rank is raised on all of them.

    Raises:
        PlanError: The first failing rank's message.
    """
    result, said = None, None
    try:
        result = work()
    except (ValueError, OSError, SafetensorError) as error:
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


def copy_boxes(source: TensorSource, found: Sequence[tuple[Shard, Sequence[Box]]]) -> None:
    """Copy the stored boxes into the shards that overlap with them.

    Raises:
        ValueError: A file is damaged.
    """
    files = sorted({box.file for _, boxes in found for box in boxes})
    with ExitStack() as stack:
        opened = {file: stack.enter_context(_opened(source, file)) for file in files}
        for shard, boxes in found:
            for box in boxes:
                try:
                    _copy(opened[box.file], box, shard)
                except SafetensorError as error:
                    raise ValueError(
                        f"{source.folder / box.file} is damaged: {error}; {REMEDY}"
                    ) from None


def _opened(source: TensorSource, file: str) -> Any:
    path = source.folder / file
    try:
        return source.opened(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged: {error}; {REMEDY}") from None


def _copy(file: Any, box: Box, shard: Shard) -> None:
    target, extent = shard.tensor.detach(), [stop - start for start, stop in box.slices]
    stored = file.get_slice(box.key)
    if box.origin is None and (has := stored.get_shape()) != extent:
        raise ValueError(
            f"{box.file}: {box.key} has shape {has}, its manifest says {extent}; {REMEDY}"
        )
    if not shard.shape:
        target.copy_(file.get_tensor(box.key))
        return
    common = intersect(box.slices, shard.slices)
    theirs = tuple(slice(s - first, e - first) for (s, e), (first, _) in zip(common, box.slices))
    ours = tuple(slice(s - first, e - first) for (s, e), (first, _) in zip(common, shard.slices))
    if box.origin is None:
        target[ours].copy_(stored[theirs])
        return
    lacking = len(theirs) - len(box.origin)
    wanted = theirs[lacking:][::-1] if box.transposed else theirs[lacking:]
    part = stored[tuple(slice(o + s.start, o + s.stop) for o, s in zip(box.origin, wanted))]
    target[ours].copy_(part.t() if box.transposed else part)
