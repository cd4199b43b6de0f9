"""Thinning the records of a long run: one in so many, with first, last and extremes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.vocabulary import ALLOCATED, MOMENTS

_START = 15
"""Bytes of a line that tell its kind."""
_SKIPPED = {
    f'{{"kind":{space}"{kind}",'.encode()[:_START]: kind
    for kind in ("timeline", "collectives")
    for space in ("", " ")
}
"""Beginnings of the records that come with every sampled step and of which one is drawn -> their
kind.
"""
EXTREMES_OF = 8
"""Times `every` records of which the extremes are kept."""


def extremes(values: Sequence[float | None]) -> set[int]:
    """Places of the first smallest, the first largest and the first value that is not finite."""
    known = {i: x for i, x in enumerate(values) if x is not None and math.isfinite(x)}
    found = {choose(known, key=known.__getitem__) for choose in (min, max) if known}
    missing = (place for place in range(len(values)) if place not in known)
    return found | set(itertools.islice(missing, 1))


def _of_step(record: dict[str, Any]) -> list[float | None]:
    seconds = record["seconds"]
    pace = record["tokens"] / seconds if seconds else None
    return [record["loss"], pace, record["bytes"], record["max_memory_allocated"]]


def _of_memory(record: dict[str, Any]) -> list[float | None]:
    sums: dict[str, float | None] = dict.fromkeys(MOMENTS)
    for row in record["rows"] or []:
        if row["category"] == ALLOCATED and row["tier"] == "device":
            sums[row["moment"]] = (sums[row["moment"]] or 0) + row["bytes"]
    return list(sums.values())


_DRAWN: dict[str, Callable[[dict[str, Any]], list[float | None]]] = {
    "step": _of_step,
    "memory": _of_memory,
}
"""Kind of the records that come with many steps -> the values of one that charts draw."""


@dataclass
class Thinning:
    """One in `every` records of steps, memory, timelines and collectives of one rank: the first and
    the last are among them.

    Of steps and memory the extremes of every `EXTREMES_OF` times `every` stay too, for each value
    that is drawn, and memory where a row of it is larger than all before: no spike and no peak is
    lost. A skipped line of the others is not even decoded. All other kinds are rare and stay.
    """

    every: int = 1
    _seen: dict[str, int] = field(default_factory=dict)
    _latest: dict[str, bytes] = field(default_factory=dict)
    """Kind -> its last line, if that was skipped."""
    _groups: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Kind -> records of which the extremes are not known yet."""
    _largest: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def skips(self, line: bytes) -> bool:
        """Whether a line is left out without a look at what it says."""
        if self.every == 1 or (kind := _SKIPPED.get(line[:_START])) is None:
            return False
        count = self._seen.get(kind, 0)
        self._seen[kind] = count + 1
        if count % self.every == 0:
            self._latest.pop(kind, None)
            return False
        self._latest[kind] = line
        return True

    def kept(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Decoded records up to this one that stay, as far as that is known: itself, or those of a
        group of its kind that it completes.
        """
        kind = record["kind"]
        if self.every == 1 or kind not in _DRAWN:
            return [record]
        group = self._groups.setdefault(kind, [])
        group.append(record)
        return self._of_group(kind) if len(group) == EXTREMES_OF * self.every else []

    def rest(self) -> list[dict[str, Any]]:
        """Records that stay of groups that are not complete: for when the file has no more."""
        return [record for kind in list(self._groups) for record in self._of_group(kind, 1)]

    def skipped(self) -> list[bytes]:
        """The last line of each kind, where it was skipped: for when the file has no more."""
        lines = list(self._latest.values())
        self._latest.clear()
        return lines

    def _of_group(self, kind: str, last: int = 0) -> list[dict[str, Any]]:
        """Records that stay of a group, its `last` ones among them."""
        group = self._groups.pop(kind)
        places = {*range(0, len(group), self.every), *range(len(group) - last, len(group))}
        for values in zip(*map(_DRAWN[kind], group)):
            places |= extremes(values)
        for place, record in enumerate(group):
            larger = [self._grows(row) for row in record["rows"] or []] if kind == "memory" else []
            places |= {place} if any(larger) else set()
        return [group[place] for place in sorted(places)]

    def _grows(self, row: dict[str, Any]) -> bool:
        key = row["moment"], row["tier"], row["category"]
        before = self._largest.get(key, -1)
        self._largest[key] = max(before, row["bytes"])
        return bool(row["bytes"] > before)
