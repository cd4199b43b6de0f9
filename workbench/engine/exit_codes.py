"""Exit codes of subprocess entry points, with one line on stderr instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from workbench.engine.verify.forked_ranks import RankError
from workbench.termination import cleaned_up_when_ended


def exit_status(work: Callable[[], None]) -> int:
    """Run `work`; returns 0, or prints its error: 2 for a refused request, 1 for a failed rank."""
    try:
        with cleaned_up_when_ended():
            work()
    except (ValueError, RankError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, RankError) else 2
    return 0
