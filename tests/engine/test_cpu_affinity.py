"""A rank keeps to those of its own cores that are near its GPU, or keeps what it has and says why;
it has no more threads than cores.
"""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workbench.engine.process_group import cpu_affinity
from workbench.engine.process_group.cpu_affinity import bind_cores, limit_threads

NEAR = [{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5, 6, 7}, {4, 5, 6, 7}]
"""Cores near each GPU of this node, in CUDA's order."""


class NoNvml(Exception):
    pass


@pytest.fixture
def eight_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The cores of this process; torch and NVML know four GPUs."""
    cores = set(range(8))

    def bind(pid: int, chosen: set[int]) -> None:
        cores.intersection_update(chosen)
        assert cores == set(chosen), "the kernel refuses cores of others"

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
    monkeypatch.setattr(os, "sched_setaffinity", bind)
    named = lambda device: SimpleNamespace(uuid=str(device.index))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", named)
    monkeypatch.setattr(cpu_affinity, "nvml_cores", lambda uuid: NEAR[int(uuid)])
    return cores


@pytest.mark.usefixtures("eight_threads")
@pytest.mark.parametrize(
    ("gpu", "ranks", "given", "kept", "threads"),
    [
        (2, 4, range(8), {4, 5, 6, 7}, 2),  # two ranks on each side
        (0, 1, range(8), {0, 1, 2, 3}, 4),  # alone
        (1, 4, (0, 1, 6), {0, 1}, 1),  # a batch system's share
        (0, 2, (5, 6), {5, 6}, 1),  # none of it is near
    ],
)
def test_a_rank_keeps_to_its_own_cores_near_its_gpu(
    gpu: int, ranks: int, given: Any, kept: set[int], threads: int, own: set[int]
) -> None:
    own.intersection_update(given)
    bind_cores(torch.device("cuda", gpu), ranks)
    assert own == kept and torch.get_num_threads() == threads


@pytest.mark.usefixtures("eight_threads")
def test_a_rank_whose_cores_nobody_knows_keeps_its_own_and_says_so(
    own: set[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: str) -> set[int]:
        raise NoNvml("Not Supported")

    monkeypatch.setattr(cpu_affinity, "nvml_cores", refuse)
    bind_cores(torch.device("cuda", 0))
    assert own == set(range(8)) and torch.get_num_threads() == 8
    said = capsys.readouterr().err
    assert said.startswith("local rank 0 keeps its") and "NoNvml: Not Supported" in said


@pytest.mark.usefixtures("eight_threads")
def test_threads_are_only_ever_taken_away() -> None:
    limit_threads(100)
    assert torch.get_num_threads() == 8
    limit_threads(0)
    assert torch.get_num_threads() == 1
