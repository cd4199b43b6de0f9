"""Thinning the records of a long run: one in so many, with first, last and peaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_START = 15
"""Bytes of a line that tell its kind."""
_THINNED = {
    f'{{"kind":{space}"{kind}",'.encode()[:_START]: kind
    for kind in ("step", "timeline", "collectives")
    for space in ("", " ")
}
"""How a writer begins the records that come with every step, or with every sampled one -> their
kind.
"""


@dataclass
class Thinning:
    """One in `every` records of steps, timelines and collectives of one rank: the first and the
    last are among them.

    A skipped line is not even decoded. Memory is decoded, and kept where it is an `every`-th record
    or where a row of it is larger than all before, so that no peak is lost. All other kinds are
    rare and stay.
    """

    every: int = 1
    _seen: dict[str, int] = field(default_factory=dict)
    _latest: dict[str, bytes] = field(default_factory=dict)
    """Kind -> its last line, if that was skipped."""
    _largest: dict[tuple[Any, ...], float] = field(default_factory=dict)
    _memory: int = 0

    def skips(self, line: bytes) -> bool:
        """Whether a line is left out without a look at what it says."""
        if self.every == 1 or (kind := _THINNED.get(line[:_START])) is None:
            return False
        count = self._seen.get(kind, 0)
        self._seen[kind] = count + 1
        if count % self.every == 0:
            self._latest.pop(kind, None)
            return False
        self._latest[kind] = line
        return True

    def rest(self) -> list[bytes]:
        """The last line of each kind, where it was skipped: for when the file has no more."""
        lines = list(self._latest.values())
        self._latest.clear()
        return lines

    def drops(self, record: dict[str, Any]) -> bool:
        """Whether a decoded record is left out."""
        if self.every == 1 or record["kind"] != "memory":
            return False
        larger = [self._grows(row) for row in record["rows"] or []]
        self._memory += 1
        return (self._memory - 1) % self.every != 0 and not any(larger)

    def _grows(self, row: dict[str, Any]) -> bool:
        key = row["moment"], row["tier"], row["category"]
        before = self._largest.get(key, -1)
        self._largest[key] = max(before, row["bytes"])
        return bool(row["bytes"] > before)
