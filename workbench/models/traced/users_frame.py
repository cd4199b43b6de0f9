"""The line of a user's own code that was running when an error came."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

OURS = (str(Path(__file__).parents[2]), *sysconfig.get_paths().values())
"""Folders of code that is no user's."""


def users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The last frame of an error that is the user's own, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*OURS, "<"))]
    return own[-1] if own else None
