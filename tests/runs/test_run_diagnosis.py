"""The first cause, from evidence alone."""

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs.test_flight_recorder import done, dump, entry
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema.written_plan import Plan
from workbench.runs.diagnose.failure_advice import _KNOWN
from workbench.runs.diagnose.first_cause import first_cause, read_errors
from workbench.runs.diagnose.flight_recorder import PREFIX
from workbench.runs.diagnose.rank_status import RankStatus
from workbench.runs.store.rank_logs import failure_lines, last_lines, log_tail
from workbench.runs.store.run_state import Cause

CLOSED = "[pair.cc:547] Connection closed by peer [127.0.0.1]:1234"
TIMED_OUT = "[unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete"


@pytest.fixture
def blame(plan: Plan, tmp_path: Path) -> Callable[..., Any]:
    """`blame(ranks, errors, log)`: the cause of a run with these remains."""
    (tmp_path / "errors").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "plan.yaml").write_text(plan.replace(**{"training.micro_batch": 4}).pin().to_yaml())

    def judge(
        ranks: list[RankStatus],
        errors: list[tuple[Any, ...]] | tuple[Any, ...] = (),
        log: str = "",
        exit_code: int = 1,
        out_of_memory: bool = False,
    ) -> Cause:
        for rank, when, kind, message in errors:
            content = {
                "rank": rank,
                "step": 7,
                "action": "1B0",
                "type": kind,
                "message": message,
                "t_epoch": when,
            }
            (tmp_path / "errors" / f"rank{rank:05d}.json").write_text(json.dumps(content))
        (tmp_path / "logs" / "launcher.log").write_text(log)
        return first_cause(
            tmp_path, {seen.rank: seen for seen in ranks}, exit_code, out_of_memory=out_of_memory
        )

    return judge


def seen(rank: int, **more: Any) -> RankStatus:
    return RankStatus(rank, pid=100 + rank, step=6, phase="training", gone=1000.0, **more)


def report(*failures: tuple[int, int]) -> str:
    blocks = [
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 1)\n"
        for rank, code in failures
    ]
    return "Failures:\n" + "\n".join(blocks)


def test_the_earliest_real_error_wins(blame: Callable[..., Any]) -> None:
    errors = [
        (0, 50.0, "RuntimeError", CLOSED),
        (1, 90.0, "ValueError", "late"),
        (2, 60.0, "ValueError", "early"),
    ]
    cause = blame([seen(0), seen(1), seen(2)], errors, report((0, 1), (1, 1), (2, 1)))
    assert (
        cause.rank == 2 and cause.message == "rank 2 raised ValueError: early in step 7, during 1B0"
    )


def test_what_a_rank_refused_stands_alone(blame: Callable[..., Any]) -> None:
    words = "step-00000002/rank00001.safetensors is damaged: its checksum timed out"
    errors = [(0, 50.0, "PlanError", words), (1, 50.1, "PlanError", words)]
    cause = blame([seen(0), seen(1)], errors, report((0, 1), (1, 1)))
    assert (cause.message, cause.log_tail) == (f"rank 0: {words}", "")


def test_a_killed_rank_before_its_survivors(blame: Callable[..., Any]) -> None:
    errors = [
        (0, 50.0, "RuntimeError", CLOSED),
        (2, 50.1, "DistNetworkError", "Connection reset by peer"),
    ]
    cause = blame([seen(0), seen(1), seen(2)], errors, report((0, 1), (2, 1), (1, -9)))
    assert cause.rank == 1 and "killed by SIGKILL" in cause.message and "outside" in cause.advice


def test_a_killed_rank_is_the_cause_where_the_launcher_names_a_survivor_first(
    blame: Callable[..., Any],
) -> None:
    errors = [(0, 999.5, "RuntimeError", CLOSED)]
    cause = blame([seen(0), seen(1)], errors, report((1, -9), (0, 1)))
    assert cause.rank == 1 and "killed by SIGKILL" in cause.message and "outside" in cause.advice


def test_a_rank_that_the_launcher_killed_in_the_end_did_not_answer(
    blame: Callable[..., Any],
) -> None:
    errors = [(0, 970.0, "RuntimeError", TIMED_OUT)]
    cause = blame([seen(0), seen(1)], errors, report((1, -9), (0, 1)))
    assert cause.rank == 1 and "stopped answering" in cause.message


def test_a_rank_that_the_launcher_killed_is_not_the_cause(blame: Callable[..., Any]) -> None:
    errors = [(2, 50.0, "ValueError", "bad batch")]
    cause = blame([seen(0), seen(1), seen(2)], errors, report((0, -9), (1, -15), (2, 1)))
    assert cause.rank == 2


def test_a_silent_rank_before_those_that_waited_for_it(blame: Callable[..., Any]) -> None:
    errors = [(0, 50.0, "RuntimeError", TIMED_OUT), (2, 50.1, "RuntimeError", TIMED_OUT)]
    cause = blame([seen(0), seen(1), seen(2)], errors, report((1, -15), (2, 1), (0, 1)))
    assert (
        cause.rank == 1
        and "stopped answering" in cause.message
        and "timeout_seconds" in cause.advice
    )


def test_a_rank_that_somebody_ended_is_the_cause(blame: Callable[..., Any]) -> None:
    errors = [(0, 50.0, "RuntimeError", CLOSED)]
    cause = blame([seen(0), seen(1)], errors, report((0, 1), (1, -15)))
    assert cause.rank == 1 and "killed by SIGTERM" in cause.message


def test_a_frozen_rank_before_those_that_waited_for_it(blame: Callable[..., Any]) -> None:
    errors = [(0, 50.0, "RuntimeError", TIMED_OUT)]
    cause = blame([seen(0), seen(1, stopped=True)], errors, report((0, 1)))
    assert cause.rank == 1 and "frozen" in cause.message


def test_only_consequences_blame_the_first_of_them(blame: Callable[..., Any]) -> None:
    errors = [(0, 51.0, "RuntimeError", CLOSED), (1, 50.0, "RuntimeError", CLOSED)]
    assert blame([seen(0), seen(1)], errors, report((0, 1), (1, 1))).rank == 1


FEED = "corpus.source: the batch of step 7 was not read within 120 s (telemetry.timeout_seconds)"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("TimeoutError", FEED),
        ("OSError", "[Errno 110] Connection timed out: '/nfs/corpus/tokens.bin'"),
        ("AcceleratorError", "CUDA error: the launch timed out and was terminated"),
    ],
)
def test_a_disk_or_gpu_that_times_out_is_a_cause(
    blame: Callable[..., Any], kind: str, message: str
) -> None:
    cause = blame([seen(0), seen(1)], [(1, 999.0, kind, message)], report((0, -15), (1, 1)))
    assert cause.rank == 1 and message in cause.message


@pytest.mark.parametrize(
    "message",
    [
        CLOSED,
        TIMED_OUT,
        "[c10d] The client socket has timed out after 60000ms while trying to connect to (a, 1)",
        "wait timeout after 600000ms, keys: /default_pg/0//cpu//0/1",
        "Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
        "[pair.cc:144] timed out connecting: SO_ERROR: Connection timed out",
        "Application timeout caused pair closure",
    ],
)
def test_who_waited_in_vain_for_another_is_no_cause(
    blame: Callable[..., Any], message: str
) -> None:
    cause = blame(
        [seen(0), seen(1)], [(1, 970.0, "RuntimeError", message)], report((0, -15), (1, 1))
    )
    assert cause.rank == 0 and "stopped answering" in cause.message


HINTS = (
    "\nSearch for `cudaErrorX' in https://docs.nvidia.com/cuda for more information.\nCUDA kernel "
    "errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with "
    "`TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("device-side assert triggered", "A kernel read or wrote"),
        ("CUDA-capable device(s) is/are busy or unavailable", "Another process holds the GPU"),
        ("system not yet initialized", "See "),
        ("unknown error", "See "),
    ],
)
def test_what_torch_adds_to_every_cuda_error_says_nothing(
    blame: Callable[..., Any], tmp_path: Path, words: str, advice: str
) -> None:
    cause = blame([seen(0)], [(0, 999.0, "AcceleratorError", f"CUDA error: {words}{HINTS}")])
    expected = f"rank 0 raised AcceleratorError: CUDA error: {words} in step 7, during 1B0"
    assert cause.message == expected and cause.advice.startswith(advice)
    assert ("{" not in cause.advice and str(tmp_path) in cause.advice) or advice != "See "


def test_weights_that_are_not_finite_ask_for_no_lower_learning_rate(
    blame: Callable[..., Any],
) -> None:
    stored = "a.safetensors: norm.weight is nan at [0, 5]; get intact weights"
    assert blame([seen(0)], [(0, 1.0, "PlanError", stored)]).advice == ""
    trained = "loss is nan"
    assert "learning_rate" in blame([seen(0)], [(0, 1.0, "FloatingPointError", trained)]).advice


def test_cublas_without_memory_is_out_of_memory(blame: Callable[..., Any]) -> None:
    words = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert "out of memory" in blame([seen(0)], [(0, 1.0, "RuntimeError", words)]).advice


def test_out_of_memory_says_what_this_plan_can_still_change(
    blame: Callable[..., Any], plan: Plan
) -> None:
    cause = blame(
        [seen(0)], [(0, 1.0, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB")]
    )
    assert (
        "training.micro_batch: 2 (now 4)" in cause.advice
        and "strategy.tensor.size: 2" in cause.advice
    )
    assert "zero" not in cause.advice or not unsupported(
        plan.replace(**{"strategy.data.zero": 3}).resolve(), "run"
    )


def test_the_kernels_killing_for_memory_is_told_from_another(blame: Callable[..., Any]) -> None:
    ranks, log = [seen(0), seen(1)], report((1, -9))
    assert "out of memory" in blame(ranks, log=log, out_of_memory=True).advice
    assert "out of memory" not in blame(ranks, log=log).advice


def test_a_launcher_that_fails_alone_shows_its_last_words(blame: Callable[..., Any]) -> None:
    cause = blame(
        [RankStatus(0), RankStatus(1)],
        log="Traceback\nValueError: unknown key `nprocs`",
        exit_code=1,
    )
    assert (
        cause.rank is None
        and "exit code 1" in cause.message
        and "unknown key `nprocs`" in cause.message
    )


def test_a_broken_error_file_is_no_obstacle(blame: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "errors" / "rank00000.json").write_text('{"rank": 0')
    assert blame([seen(0)], log=report((0, 3))).rank == 0


@pytest.mark.parametrize(
    "content",
    [
        b"5",
        b"[]",
        b"{}",
        b'{"rank": "x", "type": "E", "message": "m", "t_epoch": 1}',
        b"\xff",
        b'{"rank": 0, "type": "E", "message": ["m"], "t_epoch": 1}',
        b'{"rank": 0, "type": "E", "message": "m"}',
    ],
)
def test_a_damaged_error_file_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "rank00000.json").write_bytes(content)
    (tmp_path / "errors" / "rank00001.json").mkdir()
    assert read_errors(tmp_path) == []


RAISED = [
    "Traceback (most recent call last):",
    '  File "a.py", line 3, in step',
    "    loss.backward()",
    "RuntimeError: no",
]
REMARKS = [
    "/lib/torch/profiler/profiler.py:217: UserWarning: Profiler clears events at the end of each "
    "cycle.",
    "  warn(",
    "/lib/x.py:1: FutureWarning: soon gone",
    "[W1122 10:15:00.123456789 collection.cpp:1133] Warning: produced duplicate flow start: 4 "
    "(function operator())",
    "[rank0]:[W1122 10:15:00.123456789 ProcessGroupGloo.cpp:33] Warning: destroyed late",
    "W1122 10:15:00.123000 77 torch/distributed/run.py:766] Setting OMP_NUM_THREADS",
    "STAGE:2026-11-22 10:15:00 77:77 ActivityProfilerController.cpp:312] Completed Stage: "
    "Collection",
    "USDT:2026-11-22 10:15:00 77:77 SyncActivityProfilerHandler.cpp:52] profiler_start",
    "WARNING:2026-11-22 10:15:00 77:77 CuptiActivityProfiler.cpp:5] none",
    "WARNING:root:deprecated",
    "INFO:accelerate:hello",
]


@pytest.mark.parametrize("prefix", ["", "[rank0]: ", "[default0]:[rank0]: "])
def test_an_extract_is_what_went_wrong_not_a_harmless_warning(tmp_path: Path, prefix: str) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    lines = ["building", *REMARKS, *RAISED, *REMARKS]
    (logs / "rank00000.log").write_text("".join(f"{prefix}{line}\n" for line in lines))
    assert log_tail(tmp_path, 0).splitlines() == [f"{prefix}{line}" for line in RAISED]
    assert log_tail(tmp_path, 0, 1) == f"{prefix}RuntimeError: no"
    assert last_lines(tmp_path, 0, 1) == f"{prefix}{REMARKS[-1]}"


def test_a_stream_that_holds_warnings_alone_is_passed_over(tmp_path: Path) -> None:
    streams = tmp_path / "logs" / "none_abc" / "attempt_0" / "0"
    streams.mkdir(parents=True)
    (streams / "stderr.log").write_text("\n".join(REMARKS))
    assert log_tail(tmp_path, 0) == ""
    (streams / "stdout.log").write_text("native code gave up\n")
    assert log_tail(tmp_path, 0) == "native code gave up"


def test_lines_that_speak_of_warnings_are_not_warnings(tmp_path: Path) -> None:
    said = (
        "Error: 3 warnings were treated as errors\n  in line 5\nWarnings.h:5 "
        "failed\nInformation is missing"
    )
    assert failure_lines(said) == said


def test_a_checkpoint_that_could_not_be_written_is_known_until_one_is() -> None:
    seen = RankStatus(0)
    seen.take({"kind": "unsaved", "step": 2, "message": "checkpoint: cannot write"})
    assert seen.unsaved == "checkpoint: cannot write"
    seen.take({"kind": "checkpoint", "step": 4, "path": "step-00000004", "seconds": 0.1})
    assert seen.unsaved == ""


WATCHDOG = (
    "[rank{rank}]:[E1123 14:00:00.1 ProcessGroupNCCL.cpp:684] [Rank {rank}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum={sequence}, OpType=_ALLGATHER_BASE, NumelIn=8, "
    "NumelOut=32, Timeout(ms)=120000) ran for 120037 milliseconds before timing out.\n"
    + "frame #0: c10d::ProcessGroupNCCL::watchdogHandler()\n"
    * 40
)


def test_ranks_that_nccl_timed_out_waited_for_the_one_that_it_did_not(
    blame: Callable[..., Any],
) -> None:
    """The watchdog aborts those that wait; the launcher then ends the one that they wait for."""
    log = "".join(WATCHDOG.format(rank=rank, sequence=9) for rank in (0, 2))
    cause = blame([seen(0), seen(1), seen(2)], (), log + report((1, -15), (2, -6), (0, -6)))
    assert cause.rank == 1 and "stopped answering" in cause.message
    assert "timeout_seconds" in cause.advice and "crashed" not in cause.advice


def test_where_nccl_timed_out_all_the_furthest_behind_is_told(blame: Callable[..., Any]) -> None:
    log = WATCHDOG.format(rank=0, sequence=11) + WATCHDOG.format(rank=1, sequence=9)
    cause = blame([seen(0), seen(1)], (), log + report((1, -6), (0, -6)))
    assert cause.rank == 1 and "timeout_seconds" in cause.advice
    assert "waited 120 s in allgather 9, and NCCL timed out" in cause.message


def test_a_time_out_in_a_group_goes_by_the_processs_rank_not_the_groups(
    blame: Callable[..., Any],
) -> None:
    """Rank 3 is rank 1 of its tensor group, and torch calls it so."""
    words = WATCHDOG.format(rank=1, sequence=9).replace("[rank1]", "[rank3]")
    cause = blame([seen(n) for n in range(4)], (), words + report((2, -15), (3, -6)))
    assert cause.rank == 0 and "stopped answering" in cause.message
    cause = blame([seen(3)], (), words + report((3, -6)))
    assert cause.rank == 3 and "NCCL timed out" in cause.message


def test_sends_are_not_numbered_with_collectives(blame: Callable[..., Any]) -> None:
    log = WATCHDOG.format(rank=0, sequence=812).replace("_ALLGATHER_BASE", "COALESCED")
    log += WATCHDOG.format(rank=1, sequence=40)
    cause = blame([seen(0), seen(1)], (), log + report((1, -6), (0, -6)))
    assert cause.rank == 0
    log = WATCHDOG.format(rank=1, sequence=812).replace("_ALLGATHER_BASE", "COALESCED")
    cause = blame([seen(1)], (), log + report((1, -6)))
    assert "waited 120 s in a send or recv, and NCCL timed out" in cause.message


def test_a_watchdog_that_is_stuck_itself_is_no_crash(blame: Callable[..., Any]) -> None:
    log = (
        "[rank1]:[F1123 14:00:00.1 ProcessGroupNCCL.cpp:1575] [PG ID 0 PG GUID 0(default_pg) Rank "
        "1] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in "
        "monitoring enqueued collectives.\n"
    )
    cause = blame([seen(0), seen(1)], (), log + report((0, -15), (1, -6)))
    assert cause.rank == 1 and "its NCCL watchdog was stuck for 480 s" in cause.message
    assert "A call of CUDA or NCCL did not return" in cause.advice


GROUP = (
    "[rank{rank}]:[E1123 14:00:00.1 ProcessGroupNCCL.cpp:2395] [PG ID 3 PG GUID {guid}(tensor) "
    "Rank 0]  failure detected by watchdog at work sequence id: {sequence} PG status: last "
    "enqueued work: 12, last completed work: 8\n"
)


def test_collectives_of_different_groups_are_not_compared(blame: Callable[..., Any]) -> None:
    """Ranks 0 and 1 are at 9 and 8 of their group; rank 2 at 1 of another is behind nobody."""
    log = "".join(
        WATCHDOG.format(rank=rank, sequence=sequence)
        + GROUP.format(rank=rank, guid=guid, sequence=sequence)
        for rank, sequence, guid in ((0, 9, 5), (1, 8, 5), (2, 1, 6))
    )
    cause = blame([seen(0), seen(1), seen(2)], (), log + report((2, -6), (1, -6), (0, -6)))
    assert cause.rank == 1
    assert "waited 120 s in allgather 8 of the tensor group, and NCCL timed out" in cause.message


REMOTE = (
    "[rank{rank}]:[E1123 14:00:00.1 ProcessGroupNCCL.cpp:2068] [PG ID 0 PG GUID 0(default_pg) "
    "Rank {rank}] Process group watchdog thread terminated with exception: NCCL error: remote "
    "process exited or there was a network error, NCCL version 2.27.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer node-2<59116>\n"
)


def test_a_killed_rank_before_those_that_nccl_aborted_for_it(blame: Callable[..., Any]) -> None:
    """The launcher looks once, and names the abort of lower rank as the first."""
    ranks, log = [seen(0), seen(1)], REMOTE.format(rank=0) + report((1, -9), (0, -6))
    cause = blame(ranks, (), log)
    assert cause.rank == 1 and "killed by SIGKILL" in cause.message


def test_an_error_before_the_aborts_that_follow_it(blame: Callable[..., Any]) -> None:
    log = REMOTE.format(rank=0) + report((1, 1), (0, -6))
    cause = blame([seen(0), seen(1)], [(1, 999.9, "ValueError", "bad batch")], log)
    assert cause.rank == 1 and "ValueError: bad batch" in cause.message


def test_a_lost_connection_where_nobody_died_is_the_networks(blame: Callable[..., Any]) -> None:
    """The launcher ends rank 1 a moment after NCCL has aborted rank 0."""
    later = RankStatus(1, pid=101, step=6, phase="training", gone=1005.0)
    cause = blame([seen(0), later], (), REMOTE.format(rank=0) + report((1, -15), (0, -6)))
    assert cause.rank == 0 and "lost its NCCL connection to another rank" in cause.message
    assert "NCCL_SOCKET_IFNAME" in cause.advice and "crashed" not in cause.advice


def test_an_abort_without_a_watchdog_is_a_crash(blame: Callable[..., Any]) -> None:
    cause = blame([seen(0), seen(1)], (), report((0, -15), (1, -6)))
    assert cause.rank == 1 and "killed by SIGABRT" in cause.message and "crashed" in cause.advice


def test_a_dump_tells_whom_ranks_waited_for(blame: Callable[..., Any], tmp_path: Path) -> None:
    waits = dump(done("0", 1), entry("0", 2))
    for rank, content in {0: waits, 1: waits, 2: dump(done("0", 1)), 3: waits}.items():
        (tmp_path / "logs" / f"{PREFIX}{rank}").write_bytes(pickle.dumps(content))
    log = "".join(WATCHDOG.format(rank=rank, sequence=2) for rank in range(4))
    cause = blame([seen(rank) for rank in range(4)], (), log + report((1, -6), (0, -6)))
    assert cause.rank == 2 and cause.message.startswith("rank 2 did not enter all-reduce 2")
    assert "timeout_seconds" in cause.advice


def test_a_rank_out_of_memory_goes_before_those_that_waited_for_it(
    blame: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "logs" / f"{PREFIX}0").write_bytes(pickle.dumps(dump(entry("1", 2))))
    words = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.25 GiB "
        "of which 1.50 GiB is free. Including non-PyTorch memory, this process has 77.75 GiB "
        "memory in use. Of the allocated memory 70.25 GiB is allocated by PyTorch, and 5.00 GiB "
        "is reserved by PyTorch but unallocated."
    )
    errors = [(1, 50.0, "OutOfMemoryError", words)]
    cause = blame([seen(0), seen(1)], errors, WATCHDOG.format(rank=0, sequence=2) + report((0, -6)))
    assert cause.rank == 1
    figures = (
        "of the GPU's 79.25 GiB; free 1.50 GiB; allocated 70.25 GiB; "
        "reserved but unallocated 5.00 GiB; asked for 2.00 GiB. It ran out of memory."
    )
    assert re.search(rf"Memory: estimated peak [\d.]+ GiB a rank; {figures}", cause.advice)


def test_what_nccl_says_at_its_start_is_no_failure_of_the_network(
    blame: Callable[..., Any], tmp_path: Path
) -> None:
    """With NCCL_DEBUG=INFO."""
    said = "NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>\n"
    (tmp_path / "logs" / "rank00001.log").write_text(said)
    cause = blame([seen(0), seen(1)], (), report((1, -9)))
    assert cause.rank == 1 and "outside the run" in cause.advice


WORDS = [
    ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "Take that GPU"),
    ("CUDA error: uncorrectable ECC error encountered", "Take that GPU"),
    ("ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on 3b000", "its own"),
    ("CUDA driver version is insufficient for CUDA runtime version", "update the driver"),
    ("Failed to initialize NVML: Driver/library version mismatch", "restart the machine"),
    ("CUDA error: no kernel image is available for execution", "compute capability"),
    ("CUDA error: an illegal memory access was encountered", "CUDA_LAUNCH_BLOCKING"),
    ("CUDA error: device is busy or unavailable", "Another process holds the GPU"),
    ("ncclRemoteError: A call failed possibly due to a network error", "NCCL_SOCKET_IFNAME"),
    ("NET/IB : Got completion from peer with status=12 ", "NCCL_IB_DISABLE"),
    ("ncclSystemError: socketStartConnect: No route to host", "NCCL_SOCKET_IFNAME"),
    ("[Errno 28] No space left on device", "Free disk space"),
    ("[Errno 98] Address already in use", "Another process took the port"),
    ("after 5 steps parameter of x differs, and replicas must be equal to the bit", "resume from"),
    ("the loss of step 4 is nan: parameter a.b of rank 1 alone is not finite", "resume from"),
    ("the loss of step 4 is nan: no rank's own loss is finite", "learning_rate"),
    ("No available kernel. Aborting execution.", "head_dim"),
    ("No module named 'peft'", "Install that module"),
    ("ranks call collectives in different order", "did not make the same calls"),
    ("rank 1 was killed by SIGSEGV", "A library crashed"),
    ("KeyError: 'text'", "rank00001.log"),
]
"""(words of a rank for a failure, words of the advice for it)."""


@pytest.mark.parametrize("words, advice", WORDS)
def test_what_a_rank_says_has_advice(
    blame: Callable[..., Any], tmp_path: Path, words: str, advice: str
) -> None:
    (tmp_path / "checkpoints" / "step-00000006").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000006" / "manifest.json").write_text("{}")
    cause = blame([seen(0), seen(1)], [(1, 50.0, "DistBackendError", words)], report((1, 1)))
    assert cause.rank == 1 and advice in cause.advice
    assert "resume from step-00000006" in cause.advice or "resume from" not in advice


SLOWEST: dict[str, Any] = {"slowest": 0.25, "deadline": 10.0}
"""Times of ranks whose steps are far shorter than they may be."""


@pytest.mark.parametrize(
    ("ranks", "errors", "log", "rank", "advice"),
    [
        ([seen(0), seen(1)], (), report((1, -9)), 1, "Something outside the run killed it"),
        ([seen(0), seen(1)], (), report((0, 1), (1, -11)), 1, "A library crashed"),
        ([seen(0), seen(1, stopped=True)], (), report((0, 1)), 1, "Something stopped its process"),
        ([seen(0), seen(1, **SLOWEST)], TIMED_OUT, report((1, -15), (0, 1)), 1, "It hung"),
        ([seen(0), seen(1)], TIMED_OUT, report((1, -15), (0, 1)), 1, "may rightly take this long"),
        ([seen(0)], TIMED_OUT, report((0, 1)), 0, "Ranks did not make the same calls"),
        ([seen(0)], (), "Received 15 death signal", None, "Something outside the run killed it"),
    ],
)
def test_how_a_rank_ends_has_advice(
    blame: Callable[..., Any],
    ranks: list[RankStatus],
    errors: str | tuple[()],
    log: str,
    rank: int | None,
    advice: str,
) -> None:
    waited = [(0, 950.0, "RuntimeError", errors)] if errors else ()
    cause = blame([replace(one) for one in ranks], waited, log)
    assert cause.rank == rank and advice in cause.advice
    if "It hung" in advice:
        assert "its steps took at most 250 ms" in cause.message
        assert "timeout_seconds" not in cause.advice


def test_every_advice_has_a_case() -> None:
    """Patterns that no words above reach are those of the other tests of this file."""
    elsewhere = ("watchdog was stuck", "get intact", "frozen", "SIGKILL", "NCCL timed", "answering")
    texts = [text for text, _ in WORDS[:-1]]
    for at, (pattern, _) in enumerate(_KNOWN):
        before = [earlier for earlier, _ in _KNOWN[:at]]
        reached = any(
            re.search(pattern, text, re.IGNORECASE)
            and not any(re.search(one, text, re.IGNORECASE) for one in before)
            for text in texts
        )
        assert reached or any(words in pattern for words in elsewhere), pattern


def test_who_names_another_rank_is_not_blamed_before_it(
    blame: Callable[..., Any], tmp_path: Path
) -> None:
    words = "the loss of step 7 is nan: parameter a.b of rank 1 alone is not finite"
    cause = blame([seen(0), seen(1)], [(rank, 50.0 + rank, "E", words) for rank in (0, 1)])
    assert cause.rank == 0
    for rank in (0, 1):
        path = tmp_path / "errors" / f"rank{rank:05d}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"blamed": 1}))
    cause = blame([seen(0), seen(1)])
    assert cause.rank == 1 and "its memory" in cause.advice


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("B", "training, last step done: 6, last action B"),
        ("after_optimizer", "training, last step done: 6, after the optimizer step"),
        (None, "training, last step done: 6"),
    ],
)
def test_a_rank_says_where_it_was_in_words(action: str | None, says: str) -> None:
    assert seen(0, action=action).where == says
