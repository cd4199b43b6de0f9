"""Files of a rank in the run directory: telemetry, its log, and the error that ended it.

Telemetry never blocks a step: records go through a queue to a thread that writes each with one
`write()` to `RUN/telemetry/rank00000.jsonl`. A full disk loses records, with one warning, but does
not end the run.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import queue
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType


def rank_file(run_dir: Path, folder: str, rank: int, suffix: str) -> Path:
    """RUN/FOLDER/rank00000.SUFFIX; creates the folder."""
    path = Path(run_dir) / folder / f"rank{rank:05d}.{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


class TelemetryWriter:
    """Append-only records of one rank; queued records are lost if it is not closed."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.path = rank_file(run_dir, "telemetry", rank, "jsonl")
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._torn = False
        self._warned = False
        self._feeder = threading.Thread(target=self._feed, name="telemetry", daemon=True)
        self._feeder.start()

    def record(self, kind: str, **fields: Any) -> None:
        """Queue one record and return at once; its `t` is this host's monotonic clock in seconds.

        Args:
            kind: Kind of record.
            **fields: Plain data, or one-element tensors that are not modified any more: the thread
                reads them.
        """
        self._queue.put({"kind": kind, "t": time.monotonic(), **fields})

    def close(self, timeout: float = 10.0) -> None:
        """Write queued records and end the thread; idempotent."""
        if self._file < 0:
            return
        self._queue.put(None)
        self._feeder.join(timeout)
        if not self._feeder.is_alive():
            os.close(self._file)
        self._file = -1

    def __enter__(self) -> TelemetryWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _feed(self) -> None:
        descriptor = self._file
        while (record := self._queue.get()) is not None:
            try:
                self._write(descriptor, json_line(record))
            except (OSError, TypeError, ValueError) as error:
                self._warn(error)

    def _write(self, descriptor: int, data: bytes) -> None:
        if self._torn:
            data = b"\n" + data
        written = 0
        try:
            written = os.write(descriptor, data)
        finally:
            # A record cut short by a full disk must not swallow the next one's line.
            self._torn = (self._torn and written == 0) or 0 < written < len(data)
        if written < len(data):
            raise OSError(f"wrote {written} of {len(data)} bytes")

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            print(
                f"telemetry: cannot write {self.path}: {error}; records are lost from here on",
                file=sys.stderr,
            )


def json_line(record: Mapping[str, Any]) -> bytes:
    """A record as one line of JSON, with null for NaN and infinities."""
    try:
        text = json.dumps(record, separators=(",", ":"), default=float, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(record), separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


class _Tee:
    """A text stream that also writes to a file, unbuffered."""

    def __init__(self, stream: TextIO, file: IO[str]) -> None:
        self._stream = stream
        self._file = file

    def write(self, text: str) -> int:
        for target in (self._file, self._stream):
            try:
                target.write(text)
                target.flush()
            except OSError:
                # A closed pipe of the launcher or a full disk must not end training.
                continue
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class RankLog:
    """While open, this process's output and Python's fatal signals also go to RUN/logs/.

    The tee replaces `sys.stdout` and `sys.stderr`, so output of C++ libraries reaches only the
    launcher's log. A pipe under the file descriptors would catch it, but would lose the last lines
    of a process that aborts.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._file = rank_file(run_dir, "logs", rank, "log").open(
            "a", buffering=1, errors="replace"
        )

    def __enter__(self) -> RankLog:
        self._before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (_Tee(stream, self._file) for stream in self._before)
        faulthandler.enable(self._file)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        place: TracebackType | None,
    ) -> None:
        faulthandler.disable()
        sys.stdout, sys.stderr = self._before
        with suppress(OSError):  # a full disk loses the traceback here, not the run
            if error is not None and not isinstance(error, SystemExit):
                traceback.print_exception(kind, error, place, file=self._file)
        with suppress(OSError):
            self._file.close()


def write_error(
    run_dir: Path, rank: int, step: int | None, action: str | None, error: BaseException
) -> bool:
    """Write RUN/errors/rank00000.json atomically; only a rank's first error is kept.

    Args:
        run_dir: The run directory.
        rank: This rank.
        step: The step that failed; None before the first.
        action: The action or phase that failed.
        error: The error; the rank that it names as `blamed` is to blame, where it names one.

    Returns:
        Whether it was written.
    """
    path = rank_file(run_dir, "errors", rank, "json")
    if path.exists():
        return False
    record = {
        "rank": rank,
        "step": step,
        "action": action,
        "blamed": getattr(error, "blamed", None),
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "t_epoch": time.time(),
    }
    temporary = path.with_suffix(".writing")
    try:
        temporary.write_text(json.dumps(record))
        temporary.replace(path)
    except OSError as failure:
        print(f"cannot write {path}: {failure}", file=sys.stderr)
        return False
    return True
