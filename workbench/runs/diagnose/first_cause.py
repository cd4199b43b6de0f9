"""Why a run failed: the first cause, not the "connection closed" of those who survived it."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from workbench.runs.diagnose.failure_advice import NETWORK, advise, advise_or_log
from workbench.runs.diagnose.flight_recorder import read_dumps
from workbench.runs.diagnose.nccl_watchdog import (
    NcclTimeout,
    lags,
    lost_connection,
    nccl_timeout,
    watchdog_stuck,
)
from workbench.runs.diagnose.rank_status import RankStatus
from workbench.runs.diagnose.stalled_collective import find_stall
from workbench.runs.store.rank_logs import (
    SEARCHED_LINES,
    failure_lines,
    launcher_report,
    launcher_signal,
    log_tail,
    tail_of,
)
from workbench.runs.store.run_state import Cause
from workbench.safe_io.json_field_checks import has, number, or_null, text, whole

_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|broken pipe"
    r"|timed out (waiting|after \d+ \w+ waiting)|wait timeout after|socket timeout"
    r"|timed out connecting|errno: 110 -|client socket has timed out|timeout caused pair closure"
    r"|collective operation timeout"
    r"|remote process exited|socket error|store.*unreachable|peer .*(gone|down)",
    re.IGNORECASE,
)
"""What a rank says when another one has gone, in the words of gloo, NCCL and c10d's store: never
the first cause where there is anything else. A disk or a GPU may time out too: that is a cause.
"""
_HINTS = re.compile(
    r"\s*(CUDA kernel errors might be|Search for `cuda|For debugging consider|"
    r"(Compile with|Device-side assertion tracking).*TORCH_USE_CUDA_DSA).*"
)
"""What torch says after every CUDA error, whatever it is."""

LOOK_LATE_SECONDS = 1.0
"""A process is seen to be gone at most this long after its end."""


@dataclass(frozen=True)
class _Suspect:
    """A rank that ended badly; `weight` 0: a cause of its own, 1: stalled the others, 2: followed
    from another.
    """

    weight: int
    when: float
    """Epoch seconds; of ranks that NCCL timed out, how far they were ahead of their group."""
    rank: int
    message: str
    refused: bool = False
    """Whether it refused what it was given, in words that say all: its log adds nothing."""


def first_cause(
    folder: Path, ranks: Mapping[int, RankStatus], exit_code: int | None, *, out_of_memory: bool
) -> Cause:
    """Why the run in `folder` failed, from error files, exit codes and what was seen of its
    `ranks`.

    `out_of_memory`: the kernel ended a process of this machine for want of memory while the run
    went on.
    """
    errors = {error["rank"]: error for error in read_errors(folder)}
    codes, root = launcher_report(folder)
    if root is None and not launcher_signal(folder, exit_code):
        codes, root = _seen_codes(ranks)
    suspects = [_raised(error) for error in errors.values()]
    wordless = [seen for seen in ranks.values() if _unexplained(seen, errors, codes)]
    late = {s.rank: t for s in wordless if (t := nccl_timeout(folder, s.rank)) is not None}
    rest = [seen for seen in wordless if seen.rank not in late]
    lost = {seen.rank for seen in rest if lost_connection(folder, seen.rank)}
    by_itself = {root, *_killed_first(wordless, errors, codes, {*late, *lost})}
    suspects += _timed_out(late, ranks)
    suspects += [
        _disconnected(seen)
        if seen.rank in lost
        else _ended(seen, codes.get(seen.rank) if seen.rank in by_itself else None, folder)
        for seen in rest
    ]
    # Ranks that lose a peer fail too, with errors of their own ("connection closed"), and often
    # write them first: a cause of its own goes before a stall, a stall before a consequence.
    first = min(suspects, key=lambda s: (s.weight, s.when, s.rank), default=None)
    if first is None or (first.weight and launcher_signal(folder, exit_code)):
        return _at_launch(folder, exit_code)
    if first.weight and (cause := stall_cause(folder, ranks)) is not None:
        return cause
    tail = "" if first.refused else log_tail(folder, first.rank)
    killed = codes.get(first.rank) == -signal.SIGKILL and out_of_memory
    evidence = f"{first.message}\n{tail}" + ("\nout of memory" if killed else "")
    find = advise if first.refused else advise_or_log
    return Cause(first.rank, first.message, find(folder, evidence, first.rank), tail)


def _seen_codes(ranks: Mapping[int, RankStatus]) -> tuple[dict[int, int], int | None]:
    """As `launcher_report`, of a launcher that was stopped: the exit codes of ranks that
    nobody has waited for.
    """
    codes = {seen.rank: seen.exit_code for seen in ranks.values() if seen.exit_code}
    return codes, min(codes, key=lambda rank: ranks[rank].gone or 0.0, default=None)


def read_errors(folder: Path) -> list[dict[str, Any]]:
    """What ranks left in `errors/`, earliest first; a file that holds no error of a rank is left
    out.
    """
    found = []
    for path in sorted((folder / "errors").glob("rank*.json")):
        try:
            error = orjson.loads(path.read_bytes())
        except (OSError, orjson.JSONDecodeError):
            continue
        if has(error, _ERROR):
            found.append(error)
    return sorted(found, key=lambda error: error["t_epoch"])


_ERROR = {
    "rank": whole,
    "step": or_null(whole),
    "action": or_null(text),
    "type": text,
    "message": text,
    "t_epoch": number,
}


def _raised(error: Mapping[str, Any]) -> _Suspect:
    if error["type"] == "PlanError":
        return _Suspect(
            0,
            error["t_epoch"],
            error["rank"],
            f"rank {error['rank']}: {error['message']}",
            refused=True,
        )
    lines = [line for line in error["message"].splitlines() if not _HINTS.match(line)]
    message = f"{error['type']}: {' '.join(filter(None, map(str.strip, lines)))}"
    where = f" in step {error['step']}" if error.get("step") is not None else ""
    where += f", during {error['action']}" if error.get("action") else ""
    another = error.get("blamed") not in (None, error["rank"])
    weight = 2 if another or _CONSEQUENCE.search(message) else 0
    return _Suspect(
        weight, error["t_epoch"], error["rank"], f"rank {error['rank']} raised {message}{where}"
    )


def _unexplained(seen: RankStatus, errors: Mapping[int, Any], codes: Mapping[int, int]) -> bool:
    """Whether a rank ended, or stands still, without a word."""
    if seen.bye or seen.rank in errors:
        return False
    return seen.stopped or seen.pid is not None or seen.rank in codes


def _killed_first(
    wordless: list[RankStatus],
    errors: Mapping[int, Any],
    codes: Mapping[int, int],
    aborted: set[int],
) -> list[int]:
    """Ranks killed before any other complained; those that NCCL `aborted` complain by their end.

    Ranks that the launcher ended because of another's failure are in its report too: by SIGTERM at
    first, by SIGKILL half a minute later. Of those that fell between two of its looks it names the
    one of lowest rank the first.
    """
    ends = [seen.gone for seen in wordless if seen.rank in aborted and seen.gone is not None]
    complained = min([*(error["t_epoch"] for error in errors.values()), *ends], default=0.0)
    return [
        seen.rank
        for seen in wordless
        if codes.get(seen.rank, 0) < 0 and codes[seen.rank] != -signal.SIGTERM
        if seen.gone is not None and seen.gone - LOOK_LATE_SECONDS <= complained
    ]


def stall_cause(folder: Path, ranks: Mapping[int, RankStatus]) -> Cause | None:
    """The rank that held up the others, by what all of them entered; None where none wrote it."""
    stall = find_stall(read_dumps(folder))
    if stall is None:
        return None
    if stall.rank is None:
        return Cause(None, stall.message, NETWORK)
    tail, seen = log_tail(folder, stall.rank), ranks.get(stall.rank)
    message = stall.message + (f" ({seen.where})" if seen else "")
    return Cause(stall.rank, message, advise(folder, f"{message}\n{tail}", stall.rank), tail)


def _timed_out(late: dict[int, NcclTimeout], ranks: Mapping[int, RankStatus]) -> list[_Suspect]:
    """Ranks that waited for another. Of several, the one that is furthest behind came first."""
    return [
        _Suspect(2, -behind, rank, f"{ranks[rank].name} {late[rank]} ({ranks[rank].where})")
        for rank, behind in lags(late).items()
    ]


def _disconnected(seen: RankStatus) -> _Suspect:
    """A rank that NCCL aborted because it did not reach another, which has ended, or the network
    has failed.
    """
    words = f"{seen.name} lost its NCCL connection to another rank ({seen.where})"
    return _Suspect(1, _end(seen), seen.rank, words)


def _end(seen: RankStatus) -> float:
    return seen.gone - LOOK_LATE_SECONDS if seen.gone else float("inf")


def _ended(seen: RankStatus, code: int | None, folder: Path) -> _Suspect:
    when = _end(seen)
    if seen.stopped:
        return _Suspect(
            0, 0.0, seen.rank, f"{seen.name} is frozen: its process is stopped ({seen.where})"
        )
    if code is None:
        return _Suspect(1, when, seen.rank, f"{seen.name} stopped answering ({seen.where})")
    if code == -signal.SIGABRT and (seconds := watchdog_stuck(folder, seen.rank)) is not None:
        words = f"{seen.name} ended itself: its NCCL watchdog was stuck for {seconds} s"
        return _Suspect(0, when, seen.rank, f"{words} ({seen.where})")
    if code < 0:
        return _Suspect(
            0, when, seen.rank, f"{seen.name} was killed by {_signal(-code)} ({seen.where})"
        )
    last = log_tail(folder, seen.rank, 1) or "it printed nothing"
    return _Suspect(
        0, when, seen.rank, f"{seen.name} ended with exit code {code} ({seen.where}): {last}"
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _at_launch(folder: Path, exit_code: int | None) -> Cause:
    """The launcher failed and no rank is to blame."""
    tail = failure_lines(tail_of(folder / "logs" / "launcher.log", SEARCHED_LINES))
    last = tail.splitlines()[-1].strip() if tail else "it printed nothing"
    if number := launcher_signal(folder, exit_code):
        message = f"the launcher was killed by {_signal(number)}, and its ranks with it"
    else:
        message = (
            f"the launcher ended with exit code {exit_code} and no rank reported an error: {last}"
        )
    return Cause(None, message, advise_or_log(folder, f"{message}\n{tail}", None), tail)
