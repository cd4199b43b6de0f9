"""Which GPUs CUDA_VISIBLE_DEVICES leaves, read as CUDA reads it (CUDA C++ Programming Guide,
environment variables; torch.cuda's `_parse_visible_devices` does the same).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

NO_GPU = ("", "NoDevFiles")
"""Values that hide every GPU on purpose; Slurm writes the second for a job without GPUs."""


def hides_all(value: str | None) -> bool:
    """Whether a value of CUDA_VISIBLE_DEVICES chooses CPU ranks: empty, or -1 first."""
    first = None if value is None else value.split(",")[0].strip()
    return first is not None and (first in NO_GPU or first.startswith("-"))


def visible_indexes(value: str | None, uuids: Sequence[str]) -> list[int]:
    """Places in `uuids` that a value of CUDA_VISIBLE_DEVICES leaves, in its order.

    The list ends before the first entry that names nothing, or that is of another kind than the
    first (an index, `GPU-`, `MIG-`). A GPU named twice leaves none.

    Args:
        value: The variable's value; None: not set.
        uuids: UUIDs of all GPUs, or of all MIG slices, by index.
    """
    if value is None:
        return list(range(len(uuids)))
    words = [word.strip() for word in value.split(",")]
    kind = words[0][:4]
    found: list[int] = []
    for word in words:
        if kind in ("GPU-", "MIG-"):
            index = _of_uuid(word, uuids) if word.startswith(kind) else None
        else:
            index = _of_number(word, len(uuids))
        if index is None:
            break
        if index in found:
            return []
        found.append(index)
    return found


def _of_uuid(word: str, uuids: Sequence[str]) -> int | None:
    """A UUID may be cut short, as long as only one begins with it."""
    places = [place for place, uuid in enumerate(uuids) if uuid.startswith(word)]
    return places[0] if len(places) == 1 else None


def _of_number(word: str, count: int) -> int | None:
    """CUDA reads the leading digits, as C's strtoul does."""
    digits = re.match(r"\+?(\d+)", word)
    return int(digits[1]) if digits and int(digits[1]) < count else None
