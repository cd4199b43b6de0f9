"""What NCCL's watchdog wrote into a rank's log before it ended the process (torch's
`ProcessGroupNCCL.cpp`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from workbench.runs.store.rank_logs import log_files, tail_of

SEARCHED_LINES = 400
"""A stack of C++ frames follows the words, one for each process group."""
_TIMED_OUT = re.compile(
    r"\[Rank (\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), "
    r"OpType=(\w+),.*?Timeout\(ms\)=(\d+)"
)


@dataclass(frozen=True)
class NcclTimeout:
    """A collective of a rank that took longer than the deadline."""

    sequence: int
    what: str
    seconds: float

    def __str__(self) -> str:
        return f"waited {self.seconds:g} s in {self.what} {self.sequence}, and NCCL timed out"


def nccl_timeout(folder: Path, rank: int) -> NcclTimeout | None:
    """The first collective of `rank` that timed out, by its log, or the launcher's; None where the
    watchdog wrote nothing.
    """
    for path in (*log_files(folder, rank), folder / "logs" / "launcher.log"):
        for found in _TIMED_OUT.finditer(tail_of(path, SEARCHED_LINES)):
            if int(found[1]) == rank:
                what = found[3].lower().strip("_").removesuffix("_base").replace("_", "-")
                return NcclTimeout(int(found[2]), what, int(found[4]) / 1000)
    return None
