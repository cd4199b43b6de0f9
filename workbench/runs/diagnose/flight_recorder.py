"""Dumps of torch's flight recorder: which collectives each rank entered and completed.

NCCL's watchdog lets every rank write one when a collective times out (TORCH_NCCL_DUMP_ON_TIMEOUT).
It is a pickle of plain dicts and lists (torch's `FlightRecorder.hpp`, versions 2.x).
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench.safe_io.json_field_checks import has, text, whole

PREFIX = "flight_recorder_rank"
"""What a dump in the run directory's `logs` is called before the rank's number."""
MAX_BYTES = 64 * 2**20
"""A larger file is no dump: 2,000 calls with their stacks take a few MiB."""
_ENTRY = {"record_id": whole, "collective_seq_id": whole, "profiling_name": text, "state": text}
_PEERS = re.compile(r"(?:send|recv) (\d+)(?:->|<-)(\d+)")
_LIBRARIES = re.compile(r"/(?:torch|accelerate)/|<frozen ")


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, text and their containers; refuses whatever would import or call something."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a dump names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("a dump refers to another file")


@dataclass(frozen=True)
class Call:
    """A collective, a send or a recv that a rank entered."""

    rank: int
    group: str
    """Name of its process group, the same on all ranks."""
    sequence: int
    """Which collective of the group, from 1; of sends and recvs, how many went before."""
    what: str
    """all-reduce, send, ..."""
    peer: int | None
    """Global rank that a send goes to, or a recv comes from."""
    sizes: str
    done: bool
    started: bool
    frame: str
    """Where it was called, as file:line; empty where that is not known."""


@dataclass(frozen=True)
class Dump:
    """One rank's calls, oldest first, and the groups it knows.

    Attributes:
        members: Process group -> global ranks.
        described: Process group -> what it is for.
        forgotten: Whether the recorder has dropped older calls.
    """

    rank: int
    members: Mapping[str, tuple[int, ...]]
    described: Mapping[str, str]
    calls: tuple[Call, ...]
    forgotten: bool

    @cached_property
    def waiting(self) -> Call | None:
        """The call that the GPU is in, or the first that it could not begin."""
        left = [call for call in self.calls if not call.done]
        return next((call for call in left if call.started), left[0] if left else None)

    def has_entered(self, group: str, sequence: int) -> bool:
        """Whether the rank entered that collective of `group`, as far as it remembers."""
        known = [c.sequence for c in self.calls if c.group == group and c.peer is None]
        return max(known) >= sequence if known else self.forgotten

    def call(self, group: str, sequence: int) -> Call | None:
        """The rank's collective of that number."""
        return next(
            (c for c in self.calls if (c.group, c.sequence, c.peer) == (group, sequence, None)),
            None,
        )


def read_dumps(folder: Path) -> dict[int, Dump]:
    """Rank -> its dump, of a run directory; files that are none are passed over."""
    found = {}
    for path in (folder / "logs").glob(f"{PREFIX}*"):
        number = path.name.removeprefix(PREFIX)
        if number.isdecimal() and (dump := read_dump(path, int(number))) is not None:
            found[dump.rank] = dump
    return dict(sorted(found.items()))


def read_dump(path: Path, rank: int) -> Dump | None:
    """The dump of `rank`; None where the file is torn, too large or something else."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        with path.open("rb") as stream:
            return _dump(_PlainUnpickler(stream).load(), rank)
    except Exception:  # an unpickler raises whatever damaged bytes make it do
        return None


def _dump(content: Any, rank: int) -> Dump:
    groups = content["pg_config"]
    members = {
        str(name): tuple(int(word) for word in re.findall(r"\d+", str(group["ranks"])))
        for name, group in groups.items()
    }
    described = {str(name): str(group["desc"]) for name, group in groups.items()}
    entries = sorted(
        (entry for entry in content["entries"] if has(entry, _ENTRY)),
        key=lambda entry: entry["record_id"],
    )
    batches = {_batch_of(entry): entry for entry in entries if _is_batch(entry)}
    calls = [
        _call(entry, batches.get(_batch_of(entry), entry), rank, members)
        for entry in entries
        if not _is_batch(entry)
    ]
    return Dump(rank, members, described, tuple(calls), entries[0]["record_id"] > 0)


def _is_batch(entry: Mapping[str, Any]) -> bool:
    """Whether it stands for several sends and recvs, which have entries of their own."""
    return bool(entry.get("is_p2p")) and not _PEERS.search(entry["profiling_name"])


def _batch_of(entry: Mapping[str, Any]) -> tuple[str, object] | None:
    """Which batch of sends and recvs it belongs to, or stands for; None of a collective."""
    if not entry.get("is_p2p"):
        return None
    return str(entry["process_group"][0]), entry.get("p2p_seq_id")


def _call(
    entry: Mapping[str, Any],
    timed: Mapping[str, Any],
    rank: int,
    members: Mapping[str, tuple[int, ...]],
) -> Call:
    """A call, with the state of `timed`: NCCL's events are of a whole batch, and the entries of its
    sends and recvs stay "scheduled".
    """
    group, name = str(entry["process_group"][0]), str(entry["profiling_name"]).split(":")[-1]
    return Call(
        rank,
        group,
        int(entry["collective_seq_id"]),
        _plain_name(name),
        _peer(name, rank, members.get(group, ())),
        str(entry.get("input_sizes")),
        bool(timed.get("retired")) or timed["state"] == "completed",
        timed["state"] == "started",
        _frame(entry.get("frames") or []),
    )


def _plain_name(name: str) -> str:
    """`_all_gather_base` -> all-gather, `recv 1<-0` -> recv."""
    return name.split()[0].strip("_").removesuffix("_base").replace("_", "-")


def _peer(name: str, rank: int, members: tuple[int, ...]) -> int | None:
    """The other end of a send or recv, whose name holds indexes in the group."""
    found = _PEERS.search(name)
    if found is None:
        return None
    ends = [members[i] if i < len(members) else i for i in map(int, found.groups())]
    return next((end for end in ends if end != rank), rank)


def _frame(frames: list[Mapping[str, Any]]) -> str:
    own = next((f for f in frames if not _LIBRARIES.search(str(f["filename"]))), None)
    return "" if own is None else f"{Path(str(own['filename'])).name}:{own['line']}"
