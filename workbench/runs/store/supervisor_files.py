"""What a supervisor writes in its run directory, on a disk that may be full: a run that goes well
goes on.

A write that the disk refuses is remembered and tried again; space for the last state is
reserved.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from workbench.runs.store.run_state import State, write_state

RESERVE_BYTES = 64 * 1024
"""Reserved for the last state, whose cause holds the last lines of a log."""
LAST_SECONDS = 30.0
"""How long the last state is tried again where even that does not help."""
RETRY_SECONDS = 0.5


class SupervisorFiles:
    """The files that a supervisor writes in `folder`. `refused` is the error of the last write of
    the state.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refused: OSError | None = None
        self.lost = False
        """Whether any state or event could not be written."""
        self._reserve = folder / ".reserve"
        with suppress(OSError):
            self._reserve.write_bytes(bytes(RESERVE_BYTES))

    def state(self, state: State) -> None:
        """Replace `state.json`. Raises OSError only where the run directory is gone."""
        try:
            write_state(self.folder, state)
            self.refused = None
        except OSError as error:
            if not self.folder.is_dir():
                raise
            self._refused("state.json", error)
            self.refused = error

    def last_state(self, state: State) -> None:
        """Replace `state.json` for good: tried again for `LAST_SECONDS`, in the space that was
        reserved.
        """
        with suppress(OSError):
            self._reserve.unlink(missing_ok=True)
        deadline = time.monotonic() + LAST_SECONDS
        self.state(state)
        while self.refused is not None and time.monotonic() < deadline:
            time.sleep(RETRY_SECONDS)
            self.state(state)

    def event(self, kind: str, **values: Any) -> None:
        """Append a line to `events.jsonl`."""
        line = orjson.dumps(
            {"kind": kind, "t_epoch": time.time(), **values}, option=orjson.OPT_APPEND_NEWLINE
        )
        try:
            with (self.folder / "events.jsonl").open("ab", buffering=0) as stream:
                stream.write(line)
        except OSError as error:
            self._refused("events.jsonl", error)

    def _refused(self, name: str, error: OSError) -> None:
        if not self.lost:
            log_message(f"{name}: {error}; it is tried again, the run goes on")
        self.lost = True


def keep_frames(folder: Path) -> None:
    """Leave what was measured as CSV in `frames/`, for whoever reads a run without this program."""
    from workbench.runs import run  # pydantic and the plan: not in memory while ranks train

    try:
        run.keep_frames(folder)
    except (OSError, ValueError, KeyError) as error:
        log_message(f"frames: {type(error).__name__}: {error}")


def log_message(text: str) -> None:
    """Print to `logs/supervisor.log`, which may lie on the disk that is full."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
