"""What a run's processes printed, and what the launcher reported of its ranks."""

from __future__ import annotations

import re
from pathlib import Path

_REPORT = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s+exitcode\s*:\s*(-?\d+) \(pid: \d+\)")
"""How torchrun reports a rank that failed, or that it ended after another had; the first failure
comes last.
"""
_ALONE = re.compile(r"died with <Signals\.\w+: (\d+)>")
"""How a launch that is one process without torchrun reports a signal."""
_SIGNALLED = re.compile(r"Received (\d+) death signal|Process \d+ got signal: (\d+)")
"""How torchrun says that somebody asked it to end."""

TAIL_LINES = 20
SEARCHED_LINES = 200
"""Lines at the end of a log among which those that matter are looked for."""

_RANK = r"(?:\[(?:rank|default)?\d+\]:\s?)*"
"""What torch and its launcher put before a rank's lines."""
_REMARK = re.compile(
    _RANK + r"(?:\S+:\d+: \w*Warning: |\[?[WI]\d{4}[ \]]|(?:WARNING|INFO|DEBUG)[: \[]|Warning: "
    r"|(?!ERROR|FATAL)[A-Z]+:\d{4}-\d\d-\d\d )"
)
"""A warning or a note by its category: Python's warnings module, glog's W and I, logging's and
kineto's levels.
"""
_CONTINUED = re.compile(_RANK + r"\s{2,}\S")
"""The source line that Python shows below a warning."""
_TRACEBACK = re.compile(_RANK + r"Traceback \(most recent call last\):")


def launcher_report(folder: Path) -> tuple[dict[int, int], int | None]:
    """(exit code by rank, the rank that failed first), as the launcher reported them; code -n:
    signal n.
    """
    text = tail_of(folder / "logs" / "launcher.log", 200)
    found = [(int(rank), int(code)) for rank, code in _REPORT.findall(text)]
    alone = _ALONE.search(text)
    if not found and alone:
        found = [(0, -int(alone[1]))]
    return dict(found), found[-1][0] if found else None


def launcher_signal(folder: Path, exit_code: int | None) -> int | None:
    """The signal that ended the launcher itself; None where it ended by itself or because of a
    rank.
    """
    if exit_code is not None and exit_code < 0:
        return -exit_code
    found = _SIGNALLED.search(tail_of(folder / "logs" / "launcher.log", 200))
    return int(found[1] or found[2]) if found else None


def log_tail(folder: Path, rank: int, lines: int = TAIL_LINES) -> str:
    """The last lines of `rank` that say why it failed (see `failure_lines`): of its errors, else
    its output, else its log.

    A launch by torchrun keeps each rank's streams apart; where nothing did, the launcher's own
    lines.
    """
    own = log_files(folder, rank)
    found = next(
        (words for path in own if (words := failure_lines(tail_of(path, SEARCHED_LINES), lines))),
        "",
    )
    launcher = folder / "logs" / "launcher.log"
    return (
        found if found or len(own) > 1 else failure_lines(tail_of(launcher, SEARCHED_LINES), lines)
    )


def last_lines(folder: Path, rank: int, lines: int = TAIL_LINES) -> str:
    """The last lines that `rank` printed, whatever they say; of the same logs as `log_tail`."""
    own = log_files(folder, rank)
    found = next((words for path in own if (words := tail_of(path, lines))), "")
    return found if found or len(own) > 1 else tail_of(folder / "logs" / "launcher.log", lines)


def log_files(folder: Path, rank: int) -> list[Path]:
    """Log files of a rank: its streams, where torchrun separated them, and the one it wrote
    itself.
    """
    logs = folder / "logs"
    streams = [
        path
        for name in ("stderr", "stdout")
        for path in logs.glob(f"*/attempt_*/{rank}/{name}.log")
    ]
    return [*streams, logs / f"rank{rank:05d}.log"]


def failure_lines(text: str, lines: int = TAIL_LINES) -> str:
    """The end of a log without warnings and notes: its last traceback on, where it has one; at most
    `lines` lines.
    """
    found: list[str] = []
    remark = False
    for line in text.splitlines():
        remark = bool(_REMARK.match(line)) or (remark and bool(_CONTINUED.match(line)))
        if not remark:
            found.append(line)
    begins = [number for number, line in enumerate(found) if _TRACEBACK.match(line)]
    return "\n".join(found[begins[-1] if begins else 0 :][-lines:]).strip("\n")


def tail_of(path: Path, lines: int = TAIL_LINES) -> str:
    """The last `lines` lines of a text file that may be large; empty where it is missing."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - 400 * lines))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])
