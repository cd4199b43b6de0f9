"""The token cache: entries that are complete or do not count, made by one process at a time.

An entry is `KEY.bin` and `KEY.idx` in Megatron-LM's format, and `KEY.json` with their number and
checksums, written last: an entry without it, or with another content, does not count. Content is
compared by the files' inode and mtime, and by sha256 where those differ. An entry for a file that
holds tokens already is the `KEY.json` alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from workbench.plan.corpus_files import file_sha256


def cache_folder(name: str = "tokens") -> Path:
    """A cache of this package, such as the token cache, under the user's XDG cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "workbench" / name


def made_private(folder: Path) -> Path:
    """The cache folder, made where it is missing: what users' texts say, nobody else may read."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(PermissionError):  # of another user, who shares it
        folder.chmod(0o700)
    return folder


def opened_private(path: str | Path, flags: int) -> int:
    """An opener of `open` whose new files only this user may read."""
    return os.open(path, flags, 0o600)


def read_entry(folder: Path, key: str, report: bool = True) -> dict[str, Any] | None:
    """What the entry's .json says, where its files are intact; prints that they are damaged where
    `report`.
    """
    try:
        entry = json.loads((folder / f"{key}.json").read_text())
        for name, (stamp, sha256) in entry["files"].items():
            path = folder / name  # `name` is absolute where the tokens lie elsewhere
            if stamp[2] != path.stat().st_size:
                return None
            if stamp != file_stamp(path) and sha256 != file_sha256(path, "corpus").hex():
                if report:
                    print(
                        f"corpus: the tokens in {path} are damaged; encoding the corpus again",
                        file=sys.stderr,
                    )
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    return entry if isinstance(entry.get("documents"), int) else None


def write_entry(folder: Path, key: str, facts: dict[str, Any], files: dict[Path, str]) -> None:
    """Write the entry's .json, which makes it count.

    Args:
        folder: The cache.
        key: The entry's.
        facts: What else it says: tokens, documents, skipped.
        files: File -> sha256 of its content.
    """
    listed = {
        path.name if path.parent == folder else str(path): [file_stamp(path), sha256]
        for path, sha256 in files.items()
    }
    write_whole(folder / f"{key}.json", json.dumps({**facts, "files": listed}))


def file_stamp(path: Path) -> list[int]:
    """Inode, mtime and size: they change when a file is replaced or written to."""
    seen = path.stat()
    return [seen.st_ino, seen.st_mtime_ns, seen.st_size]


def write_whole(path: Path, text: str) -> None:
    """Write a file, or leave it as it was."""
    draft = draft_of(path)
    try:
        with open(draft, "w", encoding="utf-8", opener=opened_private) as file:
            file.write(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def draft_of(path: Path) -> Path:
    """Where this process writes what is to become `path`; nodes that share it have equal process
    numbers.
    """
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")


def remove_abandoned(folder: Path, key: str) -> None:
    """Remove drafts of an entry that processes of this machine left when they were killed."""
    for path in folder.glob(f"{key}.*.{socket.gethostname()}.*"):
        number = path.name.rpartition(".")[2]
        if number.isdecimal() and not os.path.exists(f"/proc/{number}"):
            path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, deadline: float) -> Iterator[None]:
    """Hold the lock file, which the kernel releases when its holder dies.

    A file system without locks (Lustre without `-o flock`) lets everybody in: entries are replaced
    whole, so that several may be made at once.

    Raises:
        ValueError: Another process holds it past `deadline` seconds.
    """
    until = time.monotonic() + deadline
    with open(path, "w", opener=opened_private) as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise ValueError(
                        f"corpus: another process has been encoding it for {deadline:.0f} s "
                        f"(lock {path}); `workbench tokenize PLAN` encodes it before a run"
                    ) from None
                time.sleep(0.05)
            except OSError as error:
                words = (
                    f"corpus: no lock on {path} ({error.strerror}): every rank encodes it itself"
                )
                print(words, file=sys.stderr)
                break
        yield
