"""Asking a run to stop: a file in its directory, which the supervisor and rank 0 both look for."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

GRACE_SECONDS = 30.0
LONGEST_GRACE_SECONDS = 1e9
"""Thirty years: clocks cannot represent much more."""


@dataclass(frozen=True)
class Stop:
    """The content of `RUN/stop`; an empty file means the defaults."""

    checkpoint: bool = False
    """Whether ranks save a checkpoint before they end."""
    grace_seconds: float = GRACE_SECONDS
    """How long ranks may take to end by themselves before they are ended."""


def request_stop(folder: Path, stop: Stop | None = None) -> None:
    """Ask the run in `folder` to stop; a second request changes nothing. On a full disk it is one
    of the defaults.
    """
    temporary = folder / f".stop.{os.getpid()}"
    temporary.touch()
    with suppress(OSError):
        temporary.write_bytes(orjson.dumps(asdict(stop or Stop())))
    try:
        os.link(temporary, folder / "stop")
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


def read_stop(folder: Path) -> Stop | None:
    """What was asked of the run in `folder`; None where nobody asked it to stop.

    A file that is there asks, whatever it holds: what of it is damaged or unknown counts as the
    default.
    """
    try:
        content = orjson.loads((folder / "stop").read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, orjson.JSONDecodeError):
        return Stop()
    asked = content if type(content) is dict else {}
    checkpoint, grace = asked.get("checkpoint"), asked.get("grace_seconds")
    if (
        not isinstance(grace, int | float)
        or isinstance(grace, bool)
        or not 0 <= grace <= LONGEST_GRACE_SECONDS
    ):
        grace = GRACE_SECONDS
    return Stop(checkpoint is True, grace)
