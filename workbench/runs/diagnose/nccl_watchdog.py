"""What NCCL's watchdog wrote into a rank's log before it ended the process (torch's
`ProcessGroupNCCL.cpp`).

A line begins with the process's rank ("[rank3]:"). The "[Rank 1]" after it is that of the process
group whose collective the process waited for first, and says nothing of who wrote the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workbench.runs.store.rank_logs import log_files, tail_of

SEARCHED_LINES = 400
"""A stack of C++ frames follows the words, one for each process group."""
_TIMED_OUT = re.compile(
    r"\[rank(\d+)\]:.*Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), "
    r"OpType=(\w+),.*?Timeout\(ms\)=(\d+)"
)
_GROUP = re.compile(
    r"\[rank(\d+)\]:.*\[PG ID \d+ PG GUID (\w+)(?:\(([^)]*)\))? Rank \d+\] .*detected by watchdog "
    r"at work(?: sequence id)?: (\d+)"
)
_LOST = re.compile(
    r"\[rank(\d+)\]:.*watchdog thread terminated with exception: NCCL error: remote process exited"
)
_STUCK = re.compile(r"\[rank(\d+)\]:.*watchdog got stuck for (\d+) seconds")
_P2P = ("coalesced", "send", "recv")


@dataclass(frozen=True)
class NcclTimeout:
    """A collective of a rank that took longer than the deadline.

    Attributes:
        sequence: Its number among those of its process group; a batch of sends and recvs has one
            among batches.
        group: The process group, the same on all its ranks; empty where torch did not say.
        purpose: What the group is for; empty likewise.
    """

    sequence: int
    what: str
    seconds: float
    group: str = ""
    purpose: str = ""

    def __str__(self) -> str:
        named = self.purpose not in ("", "undefined", "default_pg")
        where = f" of the {self.purpose} group" if named else ""
        what = "a send or recv" if self.is_p2p else f"{self.what} {self.sequence}"
        return f"waited {self.seconds:g} s in {what}{where}, and NCCL timed out"

    @property
    def is_p2p(self) -> bool:
        """Whether it is of sends and recvs, which are numbered apart."""
        return self.what in _P2P


def nccl_timeout(folder: Path, rank: int) -> NcclTimeout | None:
    """The first collective of `rank` that timed out, by its log, or the launcher's; None where the
    watchdog wrote nothing.
    """
    found = next(_lines(_TIMED_OUT, folder, rank), None)
    if found is None:
        return None
    groups = (m for m in _lines(_GROUP, folder, rank) if m[4] == found[2])
    _, group, purpose, _ = m.groups() if (m := next(groups, None)) else ("", "", "", "")
    what = found[3].lower().strip("_").removesuffix("_base").replace("_", "-")
    return NcclTimeout(int(found[2]), what, int(found[4]) / 1000, group, purpose or "")


def lags(timeouts: dict[int, NcclTimeout]) -> dict[int, int]:
    """Rank -> how many collectives it is behind the furthest of its process group that timed out;
    numbers of different groups, and of sends and of collectives, say nothing of each other.
    """
    furthest: dict[tuple[str, bool], int] = {}
    for late in timeouts.values():
        numbered = late.group, late.is_p2p
        furthest[numbered] = max(late.sequence, furthest.get(numbered, 0))
    return {
        rank: furthest[late.group, late.is_p2p] - late.sequence for rank, late in timeouts.items()
    }


def lost_connection(folder: Path, rank: int) -> bool:
    """Whether the watchdog ended `rank` because NCCL no longer reached another."""
    return next(_lines(_LOST, folder, rank), None) is not None


def watchdog_stuck(folder: Path, rank: int) -> int | None:
    """Seconds for which the watchdog of `rank` itself got no answer from CUDA or NCCL, before it
    ended the process; None where it wrote nothing of that.
    """
    found = next(_lines(_STUCK, folder, rank), None)
    return None if found is None else int(found[2])


def _lines(pattern: re.Pattern[str], folder: Path, rank: int) -> Iterator[re.Match[str]]:
    """What `pattern`, whose first group is a rank, finds of `rank`."""
    for path in (*log_files(folder, rank), folder / "logs" / "launcher.log"):
        for found in pattern.finditer(tail_of(path, SEARCHED_LINES)):
            if int(found[1]) == rank:
                yield found
