"""A rank keeps to the cores of its own GPU's NUMA node, or keeps what it has and says why."""

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workbench.engine.process_group.cpu_affinity import bind_cores

CORES = {"GPU-far": {0, 1}, "GPU-near": {2, 3}}
"""Cores near each GPU of this node, in NVML's order."""


class NoNvml(Exception):
    pass


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Cores that this process is bound to, one after the other; torch sees the second GPU only."""

    def cores(handle: str, words: int) -> list[int]:
        return [sum(1 << core for core in CORES[handle])] + [0] * (words - 1)

    gpus = list(CORES)
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetHandleByIndex=lambda index: gpus[index],
        nvmlDeviceGetIndex=gpus.index,
        nvmlDeviceGetCpuAffinity=cores,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    near = SimpleNamespace(uuid="near", name="H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: near)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("accelerate.utils.is_pynvml_available", lambda: True)
    found: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: found.append(set(cores)))
    return found


def test_the_gpu_is_found_by_its_uuid_where_others_are_hidden(bound: list[set[int]]) -> None:
    bind_cores(torch.device("cuda", 0))
    assert bound == [CORES["GPU-near"]]


@pytest.mark.parametrize("failing", ["nvmlDeviceGetCpuAffinity", "nvmlDeviceGetHandleByUUID"])
def test_a_rank_whose_cores_nobody_knows_keeps_its_own_and_says_so(
    failing: str,
    bound: list[set[int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: Any) -> None:
        raise NoNvml("Not Supported")

    monkeypatch.setattr(sys.modules["pynvml"], failing, refuse)
    bind_cores(torch.device("cuda", 0))
    assert not bound
    told = capsys.readouterr().err
    assert told.startswith("local rank 0 keeps its") and "NoNvml: Not Supported" in told
