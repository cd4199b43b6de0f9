"""Ranks forked from a warm process, which verify on CPU in a fraction of a launch's time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from workbench.errors import PlanError
from workbench.interop.launch_environment import ON_ONE_NODE
from workbench.runs.launch.parent_death import die_with_parent


class RankError(RuntimeError):
    """A forked rank failed; the message names the rank and carries its traceback."""


def run_ranks(
    world_size: int, work: Callable[[int], Any], seconds: float = 60.0, backend: str = "gloo"
) -> list[Any]:
    """Run `work(rank)` in forked processes joined by a process group.

    The caller must be single-threaded (`torch.set_num_threads(1)` before any operator), or children
    hang in their first operator. No process is left behind.

    Args:
        world_size: Number of ranks.
        work: Called with the rank; its result must be picklable.
        seconds: Time limit.
        backend: Of the process group. For GPUs the caller must not have touched CUDA.

    Returns:
        The results in order of rank.

    Raises:
        PlanError: What the first rank to fail refuses.
        RankError: The first failure of a rank, or the time limit.
    """
    return run_worlds([(world_size, work)], seconds, backend)[0]


def run_worlds(
    worlds: Sequence[tuple[int, Callable[[int], Any]]], seconds: float, backend: str = "gloo"
) -> list[list[Any]]:
    """As `run_ranks`, of several worlds at once, each with a process group of its own.

    Args:
        worlds: (number of ranks, work) of each.
        seconds: Time limit of all.
        backend: Of the process groups.
    """
    assert torch.get_num_threads() == 1, "call torch.set_num_threads(1) before anything runs"
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for place, (size, work) in enumerate(worlds):
            for rank in range(size):
                pipes.append(context.Pipe(duplex=False))
                store = f"{folder}/store{place}"
                arguments = rank, size, store, work, pipes[-1][1], seconds, backend
                processes.append(context.Process(target=_rank, args=arguments))
        try:
            for process in processes:
                process.start()
            for _, sender in pipes:
                sender.close()
            results = iter(
                _collect([receiver for receiver, _ in pipes], time.monotonic() + seconds)
            )
            return [list(islice(results, size)) for size, _ in worlds]
        finally:
            _end(processes)


def _rank(
    rank: int,
    world_size: int,
    store: str,
    work: Callable[[int], Any],
    pipe: Connection,
    seconds: float,
    backend: str,
) -> None:
    die_with_parent(os.getppid())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent cleans up
    os.environ.update(ON_ONE_NODE)
    # torch recreates its thread pool in a forked child; this must finish before gloo's threads
    # ask for the pool too.
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=seconds),
        )
        pipe.send(("result", work(rank)))
        dist.barrier()
    except PlanError as error:
        pipe.send(("refused", error.problems))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} did not finish in time")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                kind, value = pipe.recv()
            except EOFError:
                raise RankError(_dead(rank)) from None
            if kind == "refused":
                raise PlanError(value)
            if kind == "error":
                if (dead := _died(waiting)) is not None:
                    raise RankError(_dead(dead))
                raise RankError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in sorted(results)]


def _died(waiting: dict[Connection, int]) -> int | None:
    """A rank that died: others then fail of its connection."""
    for pipe in wait(list(waiting), timeout=0.2):
        assert isinstance(pipe, Connection)
        try:
            pipe.recv()
        except EOFError:
            return waiting[pipe]
    return None


def _dead(rank: int) -> str:
    return f"rank {rank} died without an error message"


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.pid is None:
            continue
        process.join(timeout=2)
        if process.is_alive():
            process.kill()
            process.join()
