"""Reading a run's telemetry while it grows: every complete line once; a torn last line waits until
it is complete.

Here alone records are checked: what is damaged is left out and counted, and nobody after the reader
need ask.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from workbench.runs.store.record_thinning import Thinning
from workbench.runs.store.telemetry_records import checked

Record = dict[str, Any]

POLL_BYTES = 8 * 2**20
"""Of all ranks together that one poll takes: a week's records are never in memory as objects at
once.
"""
LEAST_BYTES = 64 * 2**10
"""Of one rank that a poll takes at least, however many ranks there are."""
LONGEST_BYTES = 16 * 2**20
"""A line that is longer is damaged."""
WHOLE_BYTES = 16 * 2**20
"""Telemetry of this size is read whole by `history`; more is thinned, see `Thinning`."""
_NAME = re.compile(r"rank(\d{5,8})\.jsonl")


@dataclass
class _Tail:
    """How far one rank's file has been read."""

    rank: int
    path: Path
    thinning: Thinning
    offset: int = 0
    torn: bytes = b""
    overlong: bool = False
    """Whether the line under way has been given up."""
    damaged: int = 0
    behind: bool = False
    """True where the last read left some of the file."""
    unreadable: str = ""
    """Why the file could not be read when it was last tried; empty where it could."""

    def read(self, most: int) -> list[Record]:
        """Records completed since the last call, of at most `most` new bytes."""
        new = self._new(most)
        *lines, self.torn = (self.torn + new).split(b"\n")
        if self.overlong and lines:
            self.overlong, lines = False, lines[1:]
        if len(self.torn) > LONGEST_BYTES or self.overlong:
            self.damaged += not self.overlong
            self.overlong, self.torn = True, b""
        return self._decoded(line for line in lines if line and not self.thinning.skips(line))

    def rest(self) -> list[Record]:
        """Records that thinning held back, once the file has been read to its end."""
        return [*self._decoded(self.thinning.skipped()), *self.thinning.rest()]

    def size(self) -> int:
        """Bytes that the file has now; 0 where it cannot be read."""
        try:
            return 0 if self.unreadable else self.path.stat().st_size
        except OSError:
            return 0

    def _decoded(self, lines: Iterable[bytes]) -> list[Record]:
        found = (record for line in lines if (record := self._decode(line)) is not None)
        return [kept for record in found for kept in self.thinning.kept(record)]

    def _new(self, most: int) -> bytes:
        try:
            if self.path.stat().st_size == self.offset:
                self.behind = False
                return b""
            with self.path.open("rb") as stream:
                stream.seek(self.offset)
                new = stream.read(most)
        except OSError as error:
            self.unreadable, self.behind = error.strerror or str(error), False
            return b""
        self.unreadable, self.behind = "", len(new) == most
        self.offset += len(new)
        return new

    def _decode(self, line: bytes) -> Record | None:
        """One record with its rank; None where a line is damaged (a writer killed within a
        write).
        """
        try:
            record = checked(orjson.loads(line))
        except orjson.JSONDecodeError:
            record = None
        if record is None:
            self.damaged += 1
            return None
        return {**record, "rank": self.rank}


@dataclass
class Reader:
    """The telemetry of the run in `folder`; a new reader starts at the beginning, which is how one
    re-attaches.

    `every` > 1 keeps one in so many records of steps of a long run, see `Thinning`.
    """

    folder: Path
    every: int = 1
    _tails: dict[str, _Tail] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)

    def poll(self) -> list[Record]:
        """Records written since the last call, in order for each rank; each carries its `rank`.

        Cheap enough for ten calls a second: a file that did not grow costs one stat. Of a long file
        one call takes a part: nothing is left once a call gives nothing.
        """
        self._discover()
        most = max(LEAST_BYTES, POLL_BYTES // max(1, len(self._tails)))
        return [record for name in sorted(self._tails) for record in self._tails[name].read(most)]

    def batches(self) -> Iterator[list[Record]]:
        """What `poll` gives, call by call, until all is read that is there when this begins."""
        self._discover()
        ends = {name: tail.size() for name, tail in self._tails.items()}
        while any(
            self._tails[name].offset < min(end, self._tails[name].size())
            for name, end in ends.items()
        ):
            yield self.poll()
        yield [record for tail in self._in_order() for record in tail.rest()]

    @property
    def behind(self) -> bool:
        """True where the last poll left some of a file: a long history is read in parts."""
        return any(tail.behind for tail in self._tails.values())

    @property
    def damaged(self) -> dict[int, int]:
        """Rank -> complete lines of it that were no record and were left out; ranks without any are
        not in it.
        """
        return {tail.rank: tail.damaged for tail in self._in_order() if tail.damaged}

    @property
    def left_out(self) -> list[str]:
        """What of the telemetry is not among the records, in words; empty where all of it is."""
        words = [
            f"{count} damaged record{'s' * (count > 1)} of rank {rank}"
            for rank, count in self.damaged.items()
        ]
        words += [
            f"telemetry of rank {t.rank}: {t.unreadable}" for t in self._in_order() if t.unreadable
        ]
        return [*words, *([f"{self.every - 1} of {self.every} steps"] if self.every > 1 else [])]

    def _in_order(self) -> list[_Tail]:
        return sorted(self._tails.values(), key=lambda tail: tail.rank)

    def _discover(self) -> None:
        for path in _files(self.folder):
            match = _NAME.fullmatch(path.name)
            if match and path.name not in self._tails:
                self._tails[path.name] = _Tail(int(match[1]), path, Thinning(self.every))


def history(folder: Path) -> Reader:
    """A reader of all records of a run, thinned where that is more than `WHOLE_BYTES`."""
    total = sum(path.stat().st_size for path in _files(folder))
    return Reader(folder, every=max(1, -(-total // WHOLE_BYTES)))


def _files(folder: Path) -> list[Path]:
    """The regular files of a run's telemetry: a pipe would keep the reader waiting."""
    telemetry = folder / "telemetry"
    try:
        return [
            path for path in telemetry.iterdir() if _NAME.fullmatch(path.name) and path.is_file()
        ]
    except OSError:
        return []
