"""How a child process answers: its exit status, and one line on stderr instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from workbench.engine.verify.forked_ranks import RankError


def status(work: Callable[[], None]) -> int:
    """Run `work`; 0, or its error on stderr: 2 where what was asked is refused (ValueError), 1
    where a rank failed.
    """
    try:
        work()
    except (ValueError, RankError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, RankError) else 2
    return 0
