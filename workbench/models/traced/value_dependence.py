"""The refusal of a module whose shapes or branches depend on the values of a tensor."""

from __future__ import annotations

from workbench.errors import PlanError, refuse
from workbench.models.traced.users_frame import users_frame
from workbench.untrusted_text import brief

MOST_SAID = 500
"""Characters of a line of the user's code, and of an error's message."""
LEGAL = (
    "shapes and branches that no tensor's values decide; if it runs on one device, data "
    "parallelism and ZeRO run it without strategy.operators and without dropout"
)


def value_dependent(done: str, why: str) -> PlanError:
    """That a module cannot be `done` ("traced"), and why."""
    return refuse("model.python", f"cannot be {done}: {why}; legal: {LEGAL}")


def place_and_error(error: BaseException) -> str:
    """The line of the user's code that was running when an error came, and the error."""
    frame = users_frame(error)
    line = brief(frame.line or "", MOST_SAID) if frame else ""
    where = f"{frame.filename}:{frame.lineno}: {line}" if frame else "unknown"
    said = brief(next(iter(str(error).strip().splitlines()), ""), MOST_SAID)
    return f"{where} ({type(error).__name__}: {said})"
