"""A worker without torch that keeps the worker's contract: hello, steps in step with its peers,
stop, errors, bye.

Its "collective" waits until every peer has written the step before; a peer that is gone is an error
of the kind that gloo gives. STUB_FAULT says how one rank misbehaves: `raise:RANK:STEP`,
`silent:RANK`, `late:RANK:SECONDS` (works so long before its first record), `slow:RANK` (takes a
second of its own a step, as it says), `stuck:RANK` (joins one group less than its peers, which wait
for it), `torn:RANK`, `deaf` (heeds no stop), `exit:RANK:STEP`, `nobye:RANK`, `helper:RANK` (leaves
a process of its own behind), `loop:RANK:STEP` (works for ever), `spin:RANK:STEP` (the same on GPUs,
where the ranks that wait keep their cores busy), `watchdog:RANK:STEP` (as well, and NCCL's watchdog
aborts those).
"""

from typing import Any

from workbench.runs.launch.parent_death import die_with_parent

die_with_parent()

import json  # noqa: E402
import os  # noqa: E402
import platform  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from contextlib import suppress  # noqa: E402
from pathlib import Path  # noqa: E402

import yaml  # noqa: E402

FAULT = (os.environ.get("STUB_FAULT") or "none").split(":")
PACE = 0.02
ON_GPUS = FAULT[0] in ("spin", "watchdog")
WATCHDOG = (
    "[rank{rank}]:[E1123 14:00:00.1 ProcessGroupNCCL.cpp:757] [Rank 0] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum={step}, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, "
    "Timeout(ms)=1000) ran for 1000 milliseconds before timing out.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'"
)
"""What torch writes before it aborts; of a collective in a group in which the rank is the first."""


class Stub:
    def __init__(self, plan_file: str) -> None:
        self.run = Path(plan_file).parent
        self.rank, self.world = (
            int(os.environ.get("RANK", "0")),
            int(os.environ.get("WORLD_SIZE", "1")),
        )
        self.steps: int = yaml.safe_load(Path(plan_file).read_text())["training"]["steps"]
        self.file = os.open(self.path(self.rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.step: int | None = None

    def path(self, rank: int) -> Path:
        return self.run / "telemetry" / f"rank{rank:05d}.jsonl"

    def fault(self, kind: str, step: int | None = None) -> bool:
        return FAULT[:2] == [kind, str(self.rank)] and (step is None or int(FAULT[2]) == step)

    def write(self, kind: str, **fields: Any) -> None:
        with suppress(OSError):  # a full disk costs records, not the run
            os.write(
                self.file,
                json.dumps({"kind": kind, "t": time.monotonic(), **fields}).encode() + b"\n",
            )

    def join_groups(self) -> None:
        """The faulty rank waits before its second group, and the others in that group."""
        groups = ["the data group of ranks 0, 1, 2", "the tensor group of ranks 0, 1, 2"]
        for group in groups[: 1 if self.fault("stuck") else 2]:
            self.write("phase", phase="joining", step=None, detail=group)
        time.sleep(60)

    def hello(self) -> None:
        self.write(
            "hello",
            rank=self.rank,
            world_size=self.world,
            local_rank=self.rank,
            pid=os.getpid(),
            host=platform.node(),
            backend="stub",
            device="cuda:0" if ON_GPUS else "cpu",
            epoch_offset=time.time() - time.monotonic(),
            coordinates={"data": self.rank},
            stage=0,
            versions={},
        )

    def peer_step(self, rank: int) -> int:
        """The last step that a peer wrote; None where it is gone."""
        try:
            records = [json.loads(line) for line in self.path(rank).read_bytes().splitlines()]
        except (OSError, ValueError):
            return -1
        pid = next((r["pid"] for r in records if r["kind"] == "hello"), None)
        if pid is not None and not os.path.exists(f"/proc/{pid}/status"):
            raise ConnectionError("[pair.cc:547] Connection closed by peer")
        if any(r["kind"] == "bye" for r in records):
            return 10**9
        return max((r["step"] for r in records if r["kind"] == "step"), default=-1)

    def meet(self, step: int) -> None:
        deadline = time.monotonic() + (1 if FAULT[0] == "watchdog" else 60)
        while any(
            self.peer_step(rank) < step - 1 for rank in range(self.world) if rank != self.rank
        ):
            if time.monotonic() > deadline and FAULT[0] == "watchdog":
                print(WATCHDOG.format(rank=self.rank, step=step), file=sys.stderr, flush=True)
                os.abort()
            if time.monotonic() > deadline:
                raise TimeoutError("Timed out waiting 60000ms for a peer")
            time.sleep(0 if ON_GPUS else PACE / 2)

    def last_step(self, step: int) -> int:
        """Rank 0 heeds the request to stop and tells the others after which step."""
        agreed = self.run / "stub-last-step"
        if (
            self.rank == 0
            and (self.run / "stop").exists()
            and not agreed.exists()
            and FAULT != ["deaf"]
        ):
            draft = agreed.with_suffix(".new")
            try:
                draft.write_text(str(step + 1))
            except OSError:  # a full disk, and then there are no others
                return step - 1
            draft.rename(agreed)
        return int(agreed.read_text()) if agreed.exists() else self.steps - 1

    def train(self) -> None:
        self.hello()
        self.write("phase", phase="training", step=None, detail=None)
        for step in range(self.steps):
            if step > self.last_step(step):
                break
            self.step = step
            self.meet(step)
            if self.fault("raise", step):
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            if self.fault("exit", step):
                print("native code gave up", file=sys.stderr, flush=True)
                os._exit(7)
            while any(self.fault(kind, step) for kind in ("loop", "spin", "watchdog")):
                pass
            time.sleep(PACE)
            self.write(
                "step",
                step=step,
                loss=3.0 / (step + 1),
                seconds=1.0 if FAULT[0] == "slow" else PACE,
                own_seconds={"forward": 1.0 if self.fault("slow") else PACE, "other": 0.001},
                tokens=512,
                gradient_norm=1.0,
                learning_rate=1e-3,
                loss_scale=None,
                skipped=False,
                bytes=1000 + step,
                action="0B0",
            )
            if step == 0:
                peak = {
                    "stage": 0,
                    "moment": "peak",
                    "tier": "device",
                    "category": "allocated",
                    "bytes": 5000 + self.rank,
                }
                part = {**peak, "moment": "maximum", "category": "parameters", "bytes": 4000}
                self.write("memory", step=step, rows=[peak, part])
        if self.fault("torn"):
            os.write(self.file, b'{"kind": "step", "t": 1.0, "step": 99')
            return
        if not self.fault("nobye"):
            self.write("bye", step=self.step)

    def leave_error(self, error: BaseException) -> None:
        content = {
            "rank": self.rank,
            "step": self.step,
            "action": "0F0",
            "type": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
            "t_epoch": time.time(),
        }
        (self.run / "errors" / f"rank{self.rank:05d}.json").write_text(json.dumps(content))


def main() -> None:
    stub = Stub(sys.argv[1])
    if stub.fault("silent"):
        print("waiting for a device that never comes", file=sys.stderr, flush=True)
        signal.pause()
    if stub.fault("helper"):
        idle = [sys.executable, "-c", "import time; time.sleep(120)", str(stub.run)]
        subprocess.Popen(idle, start_new_session=True)
    began = time.monotonic()
    while stub.fault("late") and time.monotonic() - began < float(FAULT[2]):
        pass
    if FAULT[0] == "stuck":
        stub.join_groups()
    try:
        stub.train()
    except Exception as error:
        stub.leave_error(error)
        raise


main()
