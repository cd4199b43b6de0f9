"""What `doctor` says of GPUs: a stub of NVML, and a stub of the child that asks torch."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import Ask
from tests.machine import stub_nvml
from tests.machine.stub_nvml import A100, GIB, H100, StubGpu
from workbench.cli import gpu_findings
from workbench.cli.commands import doctor
from workbench.machine import attached as machine
from workbench.machine import nvml_devices
from workbench.runs.launch import child_process, subprocess_verbs

Doctor = Callable[..., tuple[int, dict[str, dict[str, Any]]]]

FACTS = {
    "torch": "2.11.0",
    "cuda": "12.8",
    "nccl": "2.27.5",
    "gpus": [
        {"name": H100, "uuid": letter, "capability": "9.0", "memory_bytes": int(79.25 * GIB)}
        for letter in "abc"
    ],
    "p2p": [[False, True, True], [True, False, True], [True, False, False]],
}
ALL_REDUCE = {"gpus": 3, "bytes": 2**26, "calls": 9000, "bus_gbs": 412.34}
ANSWERS = f"""
    import json, sys
    print("NCCL version 2.27.5")
    print(json.dumps({ALL_REDUCE} if sys.argv[1] == "all-reduce" else {FACTS}))
"""
HANGS = """
    import os, sys, time
    print("GPU 1: running its first kernel", file=sys.stderr, flush=True)
    print(os.getpid(), flush=True)
    time.sleep(60)
"""
CRASHES = f"""
    import json, os, sys
    if sys.argv[1] == "facts":
        print(json.dumps({FACTS}))
    else:
        print("host: NCCL WARN Cuda failure 700", flush=True)
        print("Fatal Python error: Aborted", file=sys.stderr, flush=True)
        os.abort()
"""
NO_KERNEL = """
    import sys
    print("GPU 0 (V100): CUDA error: no kernel image is available", file=sys.stderr)
    sys.exit(2)
"""


@pytest.fixture
def gpu_doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ask: Ask) -> Doctor:
    """`doctor --json` on a machine with `gpus`, whose child is the program given."""
    monkeypatch.setattr(machine, "_torch_cuda", lambda: ("torch 2.11.0", "12.8"))
    monkeypatch.setattr(nvml_devices, "DEVICE_NODES", tmp_path)
    monkeypatch.setattr(subprocess_verbs, "GPU_CHECK", "a_gpu_check")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def answer(
        child: str | None, gpus: list[StubGpu], error: int | None = None
    ) -> tuple[int, dict[str, dict[str, Any]]]:
        stub_nvml.install(monkeypatch, gpus, error)
        if child is not None:
            (tmp_path / "a_gpu_check.py").write_text(textwrap.dedent(child))
        code, out, _ = ask("doctor", "--json")
        return code, {row["what"]: row for row in json.loads(out)}

    return answer


def test_what_torch_says_is_shown_with_its_numbers(gpu_doctor: Doctor) -> None:
    code, found = gpu_doctor(ANSWERS, stub_nvml.gpus(3))
    assert code == 0 and found["devices"]["found"] == f"3 x {H100}"
    assert found["CUDA"]["found"] == "torch 2.11.0, CUDA 12.8, NCCL 2.27.5"
    assert found["GPU 2"]["found"] == f"{H100}, compute capability 9.0, 79.2 GiB"
    assert found["GPU 2"]["facts"]["memory_bytes"] == int(79.25 * GIB)
    assert found["P2P access"]["found"] == "2 of 3 pairs; not 1-2"
    assert found["P2P access"]["facts"]["matrix"] == FACTS["p2p"]
    reduced = found["all-reduce (NCCL)"]
    assert reduced["found"] == "3 GPUs, 64 MiB: 412.3 GB/s bus bandwidth (measured)"
    assert reduced["facts"] == ALL_REDUCE


@pytest.fixture
def deadline_after_first_line(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines of children; once one is printed, all deadlines pass."""
    printed: list[str] = []
    asked = child_process.python

    def observed(module: str, arguments: Any, on_line: Any, **more: Any) -> None:
        def hear(line: str) -> None:
            on_line(line)
            printed.append(line)

        asked(module, arguments, hear, **more)

    clock = SimpleNamespace(monotonic=lambda: 1000.0 * len(printed))
    monkeypatch.setattr(child_process, "time", clock)
    monkeypatch.setattr(child_process, "python", observed)
    return printed


def test_a_child_that_hangs_is_a_problem_with_its_last_words(
    gpu_doctor: Doctor, deadline_after_first_line: list[str]
) -> None:
    code, found = gpu_doctor(HANGS, stub_nvml.gpus(1))
    assert code == 1 and found["CUDA"]["ok"] is False
    assert "was not done in 90 s" in found["CUDA"]["found"]
    assert found["CUDA"]["found"].endswith("GPU 1: running its first kernel")
    assert "all-reduce (NCCL)" not in found
    with pytest.raises(ProcessLookupError):
        os.kill(int(deadline_after_first_line[0]), 0)


def test_a_driver_that_hangs_is_a_problem_before_this_process_asks_it(
    gpu_doctor: Doctor,
    deadline_after_first_line: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(gpu_findings, "NVML_CHECK", "a_gpu_check")

    def hang() -> None:
        raise AssertionError("this process asks a driver that hangs")

    monkeypatch.setattr(doctor, "attached", hang)
    code, found = gpu_doctor(HANGS, stub_nvml.gpus(1))
    assert code == 1 and "was not done in 20 s" in found["GPUs"]["found"]
    assert "devices" not in found and found["torch"]["ok"]


def test_a_driver_that_answers_is_asked_on(gpu_doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    code, found = gpu_doctor(ANSWERS, stub_nvml.gpus(3))
    assert code == 0 and found["CUDA"]["ok"]


def test_an_all_reduce_that_crashes_is_a_problem_beside_the_facts(gpu_doctor: Doctor) -> None:
    code, found = gpu_doctor(CRASHES, stub_nvml.gpus(3))
    reduced = found["all-reduce (NCCL)"]
    assert code == 1 and found["CUDA"]["ok"] and reduced["ok"] is False
    assert "signal SIGABRT" in reduced["found"] and "NCCL WARN Cuda failure 700" in reduced["found"]
    assert reduced["found"].endswith("Fatal Python error: Aborted") and "/dev/shm" in reduced["fix"]


@pytest.mark.parametrize(
    ("child", "says"),
    [
        (NO_KERNEL, "GPU 0 (V100): CUDA error: no kernel image is available"),
        ("print('nothing')", "a_gpu_check gave no answer | nothing"),
        (ANSWERS, "3 GPUs, NVML has 1"),
    ],
    ids=["refused", "no-answer", "another-number"],
)
def test_torch_that_does_not_use_the_gpus_is_a_problem(
    gpu_doctor: Doctor, child: str, says: str
) -> None:
    code, found = gpu_doctor(child, stub_nvml.gpus(1))
    assert code == 1 and found["CUDA"]["ok"] is False and says in found["CUDA"]["found"]


def test_unlike_gpus_are_a_problem(gpu_doctor: Doctor) -> None:
    gpus = [StubGpu(), StubGpu(A100, "GPU-b"), StubGpu(uuid="GPU-c")]
    code, found = gpu_doctor(ANSWERS, gpus)
    assert code == 1 and found["GPUs"]["found"] == f"not alike: {H100}, {A100}"
    assert found["all-reduce (NCCL)"]["ok"]


@pytest.mark.parametrize(("error", "ok"), [(12, None), (4, False)])
def test_torch_is_asked_only_where_nvml_finds_gpus(
    gpu_doctor: Doctor, error: int, ok: bool | None
) -> None:
    """12: no library, so no driver; 4: no permission."""
    code, found = gpu_doctor(None, [], error)
    assert found["GPUs"]["ok"] is ok and "NVML" in found["GPUs"]["found"]
    assert code == (1 if ok is False else 0) and "CUDA" not in found
