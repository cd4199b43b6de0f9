"""Each step's counters on CUDA: the allocator's by step, NVML's on sampled steps; without a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.engine.fake_cuda import FakeAllocator
from workbench.engine.measure.cuda_memory import CudaMemoryMeter
from workbench.engine.measure.memory_window import StepCounters
from workbench.engine.measure.step_sampler import SampledStep, allocated_rows
from workbench.machine.nvml_index import MemoryUsed, nvml_memory_used
from workbench.vocabulary import FRAGMENTATION, OUTSIDE


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    return FakeAllocator().install(monkeypatch)


@pytest.fixture
def meter(allocator: FakeAllocator) -> CudaMemoryMeter:
    return CudaMemoryMeter(torch.device("cuda", 0))


def test_counters_are_reset_only_where_there_is_an_allocator(
    allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that no launcher started comes here before anything has touched CUDA."""
    begun: list[str] = []

    def reset(device: object) -> None:
        assert begun, "Invalid device argument: did you call init?"

    monkeypatch.setattr(torch.cuda, "init", lambda: begun.append("init"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    CudaMemoryMeter(torch.device("cuda", 0)).start()
    assert begun == ["init"]


def test_each_step_has_its_own_peaks_and_retries(
    allocator: FakeAllocator, meter: CudaMemoryMeter
) -> None:
    found = []
    for size, retries in ((700, 2), (300, 0)):
        meter.begin_step()
        allocator.allocate(size)
        allocator.allocate(-size)
        allocator.retries += retries
        found.append(meter.end_step(sampled=False))
    assert [c.max_memory_allocated for c in found] == [700, 300]
    assert [c.max_memory_reserved for c in found] == [700, 700]
    assert [c.num_alloc_retries for c in found] == [2, 0]
    assert allocator.nvml_calls == 0 and found[0].process_memory_used is None


def test_the_marks_of_a_window_hide_no_peak_of_the_step(
    allocator: FakeAllocator, meter: CudaMemoryMeter
) -> None:
    meter.start()
    meter.begin_step()
    meter.mark("initialised")
    allocator.allocate(900)
    allocator.allocate(-800)
    meter.mark("before_optimizer")  # resets the allocator's own peak
    allocator.allocate(50)
    meter.mark("after_optimizer")
    assert meter.end_step(sampled=True).max_memory_allocated == 900
    window = meter.stop()
    assert (window.peak, window.end, window.peak_of("before_optimizer")) == (900, 150, 150)


def test_a_windows_start_within_a_step_keeps_the_steps_peak(
    allocator: FakeAllocator, meter: CudaMemoryMeter
) -> None:
    meter.begin_step()
    allocator.allocate(500)
    allocator.allocate(-500)
    meter.start()
    allocator.allocate(100)
    assert meter.stop().peak == 100
    assert meter.end_step(sampled=False).max_memory_allocated == 500


def test_nvml_is_asked_on_sampled_steps_and_may_know_nothing(
    allocator: FakeAllocator, meter: CudaMemoryMeter
) -> None:
    allocator.allocate(1000)
    allocator.used = MemoryUsed(by_all=5000, by_process=1600)
    meter.begin_step()
    told = meter.end_step(sampled=True)
    assert (told.device_memory_used, told.process_memory_used, told.outside_allocator) == (
        5000,
        1600,
        600,
    )
    allocator.used = None
    meter.begin_step()
    silent = meter.end_step(sampled=True)
    assert silent.device_memory_used is silent.outside_allocator is None
    assert silent.max_memory_allocated == 1000


def test_a_sampled_step_has_rows_of_what_is_reserved_and_outside(
    allocator: FakeAllocator, meter: CudaMemoryMeter
) -> None:
    allocator.used = MemoryUsed(by_all=5000, by_process=1600)
    meter.start()
    meter.begin_step()
    for moment in ("initialised", "before_optimizer", "after_optimizer"):
        meter.mark(moment)
        allocator.allocate(400)
        allocator.allocate(-300)
    counters = meter.end_step(sampled=True)
    sampler: Any = SimpleNamespace(stage=3, memory_rows=list)
    (allocated,) = allocated_rows(meter.stop(), 3)
    rows = SampledStep(0, sampler, counters).memory_rows(allocated)
    found = {(row["moment"], row["category"]): row["bytes"] for row in rows}
    assert found["peak", "allocated"] == 600 and len(found) == len(rows)
    assert found["peak", FRAGMENTATION] == 0 and found["peak", OUTSIDE] == 1000
    assert ("after_optimizer", "allocated") not in found  # the step's own record has it
    on_cpu = SampledStep(0, sampler, StepCounters()).memory_rows(allocated)
    assert {row["category"] for row in on_cpu} == {"allocated"}


class Process(NamedTuple):
    pid: int
    usedGpuMemory: int | None


@pytest.mark.parametrize(
    "processes, own",
    [
        ([Process(7, 300), Process(8, 50)], 300),
        ([Process(4242, 300)], 300),  # a container's process has another number on the host
        ([Process(8, 50), Process(9, 60)], None),
        ([], None),
        ([Process(7, None)], None),
    ],
)
def test_nvmls_share_of_a_process(
    monkeypatch: pytest.MonkeyPatch, processes: list[Process], own: int | None
) -> None:
    calls: list[str] = []
    stub = SimpleNamespace(
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=900),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: processes,
    )
    monkeypatch.setitem(sys.modules, "pynvml", stub)
    assert nvml_memory_used("0", 7) == MemoryUsed(900, own)
    assert calls == ["init", "shutdown"]
