"""Asynchronous distributed checkpointing: training goes on beside copies to host memory, and waits
for them before it changes what is copied.

Ranks synchronise through the folder, without collectives, which a background thread could not order
with the training's: each rank writes its file, then its index; rank 0 merges the indexes and
commits, and the others observe that. Every wait has a timeout that restarts while something is
being written, and a failed rank leaves a file that the others read.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from workbench.checkpoint import checkpoint_format
from workbench.checkpoint.checkpoint_format import Shard, checkpoint_path
from workbench.checkpoint.checkpoint_lock import FREE_SPACE, unwritable_error
from workbench.checkpoint.host_staging import start_copy_to_host
from workbench.copy_stream import CopyStream

FIRST_POLL_SECONDS, MAX_POLL_SECONDS = 0.005, 0.5
"""Interval at which the folder is polled: doubled from the first to the last."""
HEARTBEAT_SECONDS = 0.1
"""Minimum interval of rank 0's heartbeats."""


@dataclass(frozen=True)
class WriteJob:
    """A checkpoint being written."""

    step: int
    shards: Sequence[Shard]
    meta: dict[str, Any]
    writing: Path
    final: Path
    started: float


class CheckpointWriter:
    """Writes the checkpoints of one rank, one at a time.

    Args:
        folder: The folder of checkpoints.
        rank: This rank.
        world_size: Number of ranks.
        token: A name that all ranks of this run share, and no other run has.
        keep: Number of latest checkpoints that stay.
        timeout: Seconds without progress on the disk after which a checkpoint is given up.
        on_committed: Called from the thread with (step, folder, seconds since `start`).
        copies: The stream of copies to host memory, which nothing else uses.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        token: str,
        keep: int,
        timeout: float,
        on_committed: Callable[[int, Path, float], None] = lambda step, path, seconds: None,
        copies: CopyStream | None = None,
    ) -> None:
        self._stream = copies or CopyStream(torch.device("cpu"))
        self._wait_for_copies: Callable[[], None] = lambda: None
        self.folder, self.rank, self.world_size, self.token = folder, rank, world_size, token
        self.keep, self.timeout, self.on_committed = keep, timeout, on_committed
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._beat = 0.0
        self._copies: list[Shard] = []
        self._disk_timed_out = False
        """Whether the thread under way has been given up."""

    def start(
        self, step: int, shards: Sequence[Shard], meta: dict[str, Any], copy: bool = True
    ) -> Path:
        """Copy the shards and write them in the background; called by every rank at the same steps.

        Waits for the previous checkpoint first.

        Args:
            step: Steps done.
            shards: This rank's shards.
            meta: The manifest's `meta`.
            copy: Copy to host memory first: the shards must not change before `before_update`.
                Without, they must not change until `wait` returns.

        Returns:
            The folder that the checkpoint will have once committed.

        Raises:
            ValueError: The previous checkpoint could not be written.
        """
        began = time.monotonic()
        if self.rank == 0 and self._thread is not None and self._thread.is_alive():
            print(
                f"checkpoint: step {step} waits until the previous one is written; a larger "
                f"checkpoint.every would avoid this"
            )
        self.wait()
        final = checkpoint_path(self.folder, step)
        writing = final.with_name(f"{final.name}.writing-{self.token}")
        if copy:
            shards = self._copies = start_copy_to_host(shards, self._stream, self._copies)
            self._wait_for_copies = self._stream.copied()
        job = WriteJob(step, shards, meta, writing, final, began)
        self._beat = time.monotonic()
        self._thread = threading.Thread(
            target=self._run, args=(job,), name="checkpoint", daemon=True
        )
        self._thread.start()
        return final

    def before_update(self) -> None:
        """Let the device wait for the copies, before shards change."""
        self._wait_for_copies()
        self._wait_for_copies = lambda: None

    def check(self) -> None:
        """Raise the background error, if there is one already."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Wait until the pending checkpoint is committed.

        Raises:
            ValueError: It could not be written.
        """
        while self._thread is not None and self._thread.is_alive() and self._error is None:
            self._thread.join(0.0 if self._disk_timed_out else 0.2)
            if self._disk_timed_out or time.monotonic() - self._beat > 3 * self.timeout:
                self._disk_timed_out = True
                raise self._timeout_error(self.folder)
        self._disk_timed_out = False
        self._thread = None
        self.check()

    def _run(self, job: WriteJob) -> None:
        try:
            try:
                self._write(job)
            except OSError as error:
                raise unwritable_error(job.writing, error) from error
            except AssertionError as error:
                raise RuntimeError(
                    f"checkpoint: the ranks' shards do not cover the model: {error}"
                ) from error
        except BaseException as error:
            checkpoint_format.delete_rank_files(job.writing, self.rank)
            self._mark(job.writing, error)
            self._error = error

    def _write(self, job: WriteJob) -> None:
        self._stream.synchronize()
        job.writing.mkdir(parents=True, exist_ok=True)
        checkpoint_format.write_rank_file(
            job.writing, self.rank, job.shards, partial(self._alive, job.writing)
        )
        if self.rank == 0:
            self._gather(job.writing)
            for failed in self.folder.glob(f"step-*.writing-{self.token}"):
                if failed != job.writing:  # unused: all ranks have started this one
                    shutil.rmtree(failed, ignore_errors=True)
            checkpoint_format.commit_checkpoint(job.writing, job.final, self.world_size, job.meta)
            checkpoint_format.prune_checkpoints(self.folder, self.keep, job.final)
        else:
            self._see_committed(job)
        self.on_committed(job.step, job.final, time.monotonic() - job.started)

    def _alive(self, writing: Path, nbytes: int = 0) -> None:
        """Something was written: restart the timeout; rank 0 also lets the waiting ranks see it."""
        now = time.monotonic()
        if self.rank == 0 and now - self._beat > HEARTBEAT_SECONDS:
            (writing / "alive").touch()
        self._beat = now

    def _gather(self, writing: Path) -> None:
        """Wait until every rank has written its part, sending heartbeats while any of them does."""
        missing, size = [*range(self.world_size)], -1
        for _ in self._polls(writing, lambda: f"rank {missing[0]} has not written its part of"):
            while missing and checkpoint_format.rank_index_path(writing, missing[0]).exists():
                del missing[0]
            if not missing:
                return
            if (now := _size(writing)) != size:
                size = now
                self._alive(writing)

    def _see_committed(self, job: WriteJob) -> None:
        alive = -1
        for _ in self._polls(job.writing, lambda: "rank 0 has not committed", slower=2):
            try:
                now = (job.writing / "alive").stat().st_mtime_ns
            except FileNotFoundError:
                now = alive
                if not job.writing.exists() and job.final.exists():
                    return
            if now != alive:
                alive = now
                self._alive(job.writing)

    def _polls(self, writing: Path, what: Callable[[], str], slower: int = 1) -> Iterator[None]:
        """Yield now and at each poll.

        Raises:
            ValueError: Another rank has failed, or the timeout has passed without progress.
        """
        pause = FIRST_POLL_SECONDS
        while True:
            yield
            for name in (name for name in _names(writing) if name.endswith(".failed")):
                raise ValueError(_read(writing / name) or f"checkpoint: {name} in {writing}")
            if time.monotonic() - self._beat > slower * self.timeout:
                raise ValueError(
                    f"checkpoint: {what()} {writing} for {slower * self.timeout:.0f} s; "
                    f"{FREE_SPACE}, or raise telemetry.timeout_seconds"
                )
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)

    def _timeout_error(self, path: Path) -> ValueError:
        return ValueError(
            f"checkpoint: the disk of {path} has not answered for {3 * self.timeout:.0f} s; "
            "check it, or keep runs elsewhere (--root)"
        )

    def _mark(self, writing: Path, error: BaseException) -> None:
        """Leave the error for the other ranks, if the disk allows."""
        try:
            checkpoint_format.write_atomically(
                writing / f"rank{self.rank:05d}.failed", f"{error} (rank {self.rank})"
            )
        except OSError:
            return


def _size(folder: Path) -> int:
    """Bytes of the ranks' files, without drafts that are being renamed."""
    return sum((folder / name).stat().st_size for name in _names(folder) if name.startswith("rank"))


def _names(folder: Path) -> list[str]:
    """Names in the folder; none once it has been renamed by the commit."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
