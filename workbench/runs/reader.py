"""Reading a run's telemetry while it grows: every complete line once, a torn last line kept until it is whole."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from workbench.runs.records import filled

_NAME = re.compile(r"rank(\d{5,})\.jsonl$")


@dataclass
class _Tail:
    """How far one rank's file has been read."""

    rank: int
    path: Path
    offset: int = 0
    torn: bytes = b""
    damaged: int = 0

    def read(self) -> list[dict[str, Any]]:
        """Records completed since the last call."""
        if self.path.stat().st_size == self.offset:
            return []
        with self.path.open("rb") as stream:
            stream.seek(self.offset)
            new = stream.read()
        self.offset += len(new)
        *lines, self.torn = (self.torn + new).split(b"\n")
        return [record for line in lines if line and (record := self._decode(line)) is not None]

    def _decode(self, line: bytes) -> dict[str, Any] | None:
        """One record with its rank; None where a line is damaged (a writer killed within a write)."""
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            record = None
        if not isinstance(record, dict) or "kind" not in record:
            self.damaged += 1
            return None
        return {**filled(record), "rank": self.rank}


@dataclass
class Reader:
    """The telemetry of the run in `folder`; a new reader starts at the beginning, which is how one re-attaches."""

    folder: Path
    _tails: dict[str, _Tail] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)

    def poll(self) -> list[dict[str, Any]]:
        """Records written since the last call, in order for each rank; each carries its `rank`.

        Cheap enough for ten calls a second: a file that did not grow costs one stat.
        """
        self._discover()
        return [record for name in sorted(self._tails) for record in self._tails[name].read()]

    @property
    def damaged(self) -> int:
        """Complete lines that were no record and were left out."""
        return sum(tail.damaged for tail in self._tails.values())

    def _discover(self) -> None:
        telemetry = self.folder / "telemetry"
        names = os.listdir(telemetry) if telemetry.is_dir() else []
        for name in names:
            match = _NAME.match(name)
            if match and name not in self._tails:
                self._tails[name] = _Tail(int(match[1]), telemetry / name)
