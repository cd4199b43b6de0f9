"""Subprocess entry point: what torch.cuda says of the GPUs, and an all-reduce over all of them.

`python -m workbench.engine.gpu_check facts` and `... all-reduce --gpus 8` print one line of JSON;
what they are doing goes to stderr, where a hang leaves it as their last words.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from workbench.engine.exit_codes import exit_status
from workbench.engine.verify.forked_ranks import run_ranks

MESSAGE_BYTES = 64 * 2**20
"""Large enough that bandwidth, not latency, is measured."""
MOST_CALLS = 100_000
RANKS_SECONDS = 45.0
"""How long the ranks may take to join NCCL, and to measure."""


def main() -> int:
    """Print the answer; exit code 2 where torch has no usable GPU, 1 if a rank failed."""
    parser = argparse.ArgumentParser(prog="python -m workbench.engine.gpu_check")
    parser.add_argument("what", choices=("facts", "all-reduce"))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    asked: Callable[[], dict[str, Any]] = (
        facts
        if arguments.what == "facts"
        else partial(all_reduce_bandwidth, arguments.gpus, arguments.seconds)
    )
    return exit_status(lambda: print(json.dumps(asked()), flush=True))


def facts() -> dict[str, Any]:
    """Versions, GPUs in CUDA's order, and which pairs have P2P access.

    Raises:
        ValueError: torch has no GPU, or one that does not run a kernel.
    """
    # loads Accelerate, which the ranks of an all-reduce are better forked without
    from workbench.engine.process_group.gpu_binding import why_not_cuda

    if not torch.cuda.is_available():
        raise ValueError(why_not_cuda())
    devices = range(torch.cuda.device_count())
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "gpus": [_gpu(index) for index in devices],
        "p2p": [[_has_access(one, other) for other in devices] for one in devices],
    }


def _gpu(index: int) -> dict[str, Any]:
    print(f"GPU {index}: running its first kernel", file=sys.stderr, flush=True)
    found = torch.cuda.get_device_properties(index)
    try:  # a torch that was not built for this GPU says so here
        total = float(torch.ones(1024, device=f"cuda:{index}").sum())
    except RuntimeError as error:
        raise ValueError(f"GPU {index} ({found.name}): {_first_line(error)}") from None
    if total != 1024:
        raise ValueError(f"GPU {index} ({found.name}): 1024 ones add up to {total:g}")
    return {
        "name": found.name,
        "uuid": str(found.uuid),
        "capability": f"{found.major}.{found.minor}",
        "memory_bytes": int(found.total_memory),
    }


def _has_access(one: int, other: int) -> bool:
    return one != other and torch.cuda.can_device_access_peer(one, other)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def all_reduce_bandwidth(gpus: int, seconds: float, device_type: str = "cuda") -> dict[str, Any]:
    """Bandwidth of all-reduce over all GPUs, one process each, on loopback.

    Args:
        gpus: World size.
        seconds: How long to measure, about.
        device_type: cuda over NCCL; cpu over gloo.

    Returns:
        `bus_gbs`: bytes that each rank sends and receives, GB/s, as NCCL's tests count them
        (`2 (n - 1) / n` of the message; 0 of one GPU), beside the number of calls.

    Raises:
        RankError: A rank failed, or they did not meet in time.
    """
    work = partial(_measure, seconds=seconds, device_type=device_type)
    backend = "nccl" if device_type == "cuda" else "gloo"
    found = run_ranks(gpus, work, RANKS_SECONDS + seconds, backend)
    calls, spent = found[0][0], max(each for _, each in found)
    volume = 2 * (gpus - 1) / gpus * MESSAGE_BYTES * calls
    bus = volume / spent / 1e9
    return {"gpus": gpus, "bytes": MESSAGE_BYTES, "calls": calls, "bus_gbs": bus}


def _measure(rank: int, seconds: float, device_type: str) -> tuple[int, float]:
    """(calls, seconds they took) of this rank, after a sum whose result is known."""
    device = torch.device(device_type, rank if device_type == "cuda" else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    message = torch.ones(MESSAGE_BYTES // 4, device=device)
    print(f"rank {rank}: first all-reduce", file=sys.stderr, flush=True)
    dist.all_reduce(message)
    wrong = int((message != dist.get_world_size()).sum())
    if wrong:
        raise RuntimeError(f"{wrong} of {message.numel()} ones added up to other than world size")
    message.zero_()  # sums that are repeated stay finite
    one = torch.tensor([_timed(message, 3) / 3], device=device)
    dist.all_reduce(one, dist.ReduceOp.MAX)  # all ranks must call equally often
    calls = max(1, min(MOST_CALLS, int(seconds / max(float(one), 1e-6))))
    return calls, _timed(message, calls)


def _timed(message: torch.Tensor, calls: int) -> float:
    """Seconds of `calls` consecutive all-reduces."""
    begin = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(message)
    if message.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
