"""Stored tensors read back into whatever a rank holds of them: all refused together, or none.

Each file that somebody needs is verified once, by one of the ranks that need it; what any rank
finds wrong is raised on all of them, so that none is left waiting. A rank reads the boxes that
overlap with its own, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open

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
    """This rank among those that load together; `gather` gives the objects of all of them, in order
    of rank.
    """

    rank: int = 0
    gather: Callable[[Any], list[Any]] = lambda item: [item]


def load_shards(
    source: TensorSource, wanted: Sequence[Shard], ranks: LoadingRanks | None = None
) -> None:
    """Copy the stored values into `wanted`, in place, from whatever mesh wrote them.

    Checksums of all files that are read, and all names, shapes and dtypes, are verified before
    anything is copied. Raises `PlanError` on all ranks, naming the file or the tensor, and what to
    do.
    """
    ranks = ranks or LoadingRanks()
    found = raise_on_all_ranks(ranks, lambda: locate_boxes(source, wanted))
    needs = ranks.gather(sorted({box.file for _, boxes in found for box in boxes}))
    own = assign_files(needs, {file: size for file, (size, _) in source.files.items()})[ranks.rank]
    raise_on_all_ranks(ranks, partial(verify_files, source, own))
    raise_on_all_ranks(ranks, lambda: copy_boxes(source, found))


def raise_on_all_ranks(ranks: LoadingRanks, work: Callable[[], T]) -> T:
    """The result of `work`; or on every rank the first error that any of them has met."""
    result, said = None, None
    try:
        result = work()
    except (ValueError, OSError, SafetensorError) as error:
        said = str(error)
    for words in ranks.gather(said):
        if words is not None:
            raise PlanError(
                Problem("", words)
            )  # the words say all: what was read is at fault, not the code
    return result  # type: ignore[return-value]


def assign_files(needs: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> list[list[str]]:
    """Which files each rank verifies, by the files that each needs: every file once, about as many
    bytes on each.
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
    """Each shard and the boxes to read it from. ValueError where what is stored is not what the
    plan needs.
    """
    found = [(shard, overlapping_boxes(source, shard)) for shard in wanted]
    unwanted = {kind for _, kind in source.tensors} - {"step", *(shard.kind for shard in wanted)}
    if source.exact and wanted and unwanted:
        raise ValueError(
            f"{source.folder} holds {', '.join(sorted(unwanted))} of its parameters, which the "
            f"plan has "
            f"not; {SETTINGS}"
        )
    return found


def overlapping_boxes(source: TensorSource, shard: Shard) -> list[Box]:
    """The stored boxes that overlap with what is wanted. ValueError where they are not what the
    plan needs.
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
            f"{folder}: {what} has {covered} of the {num_entries(shard.slices)} values wanted; {REMEDY}"
        )
    for box in boxes:
        if source.exact and box.dtype != SAFETENSORS_DTYPES[shard.tensor.dtype]:
            raise ValueError(
                f"{folder}: {what} is {box.dtype}, the plan needs {SAFETENSORS_DTYPES[shard.tensor.dtype]}; "
                f"{SETTINGS}"
            )
    return boxes


def intersect(a: Slices, b: Slices) -> Slices:
    """Common part of two boxes of one tensor, empty where there is none."""
    return tuple((max(s, t), max(max(s, t), min(e, f))) for (s, e), (t, f) in zip(a, b))


def copy_boxes(source: TensorSource, found: Sequence[tuple[Shard, Sequence[Box]]]) -> None:
    """Copy every box into the shards that overlap with it."""
    files = sorted({box.file for _, boxes in found for box in boxes})
    with ExitStack() as stack:
        opened = {file: stack.enter_context(_opened(source.folder / file)) for file in files}
        for shard, boxes in found:
            for box in boxes:
                try:
                    _copy(opened[box.file], box, shard)
                except SafetensorError as error:
                    raise ValueError(
                        f"{source.folder / box.file} is damaged: {error}; {REMEDY}"
                    ) from None


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged: {error}; {REMEDY}") from None


def _copy(file: Any, box: Box, shard: Shard) -> None:
    target, extent = shard.tensor.detach(), [stop - start for start, stop in box.slices]
    if (has := file.get_slice(box.key).get_shape()) != extent:
        raise ValueError(
            f"{box.file}: {box.key} has shape {has}, its checkpoint says {extent}; {REMEDY}"
        )
    if not shard.shape:
        target.copy_(file.get_tensor(box.key))
        return
    common = intersect(box.slices, shard.slices)
    theirs = tuple(slice(s - first, e - first) for (s, e), (first, _) in zip(common, box.slices))
    ours = tuple(slice(s - first, e - first) for (s, e), (first, _) in zip(common, shard.slices))
    target[ours].copy_(file.get_slice(box.key)[theirs])
