"""A launcher for fault tests: starts ranks, ends all when one fails and reports it, as torchrun
does, in 0.1 s.

`python -m tests.runs.light_launcher WORLD FAULT -m MODULE PLAN`; FAULT is passed on to the stub
worker.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

REPORT = """  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid})"""


def start(rank: int, world: int, fault: str, command: list[str]) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "STUB_FAULT": fault,
    }
    logs = Path(command[-1]).parent / "logs" / "light" / "attempt_0" / str(rank)
    logs.mkdir(parents=True)
    with (logs / "stdout.log").open("wb") as out, (logs / "stderr.log").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, *command], env=env, start_new_session=True, stdout=out, stderr=err
        )


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + 3
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.wait()


def asked_to_end(number: int, processes: list[subprocess.Popen[bytes]]) -> None:
    end(processes)
    print(f"Received {number} death signal, shutting down workers", flush=True)
    sys.exit(1)


def main() -> None:
    world, fault, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    processes = [start(rank, world, fault, command) for rank in range(world)]
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_end(number, processes))
    while not (
        failed := [(rank, process) for rank, process in enumerate(processes) if process.poll()]
    ):
        if all(process.poll() == 0 for process in processes):
            sys.exit(0)
        time.sleep(0.05)
    end(processes)
    for rank, process in failed:
        print(REPORT.format(rank=rank, code=process.returncode, pid=process.pid), flush=True)
    sys.exit(1)


main()
