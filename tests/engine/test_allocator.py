"""Measured memory is the allocator's: exact on known allocations, aligned across windows."""

import pytest
import torch
from torch import nn

from workbench.engine.measure.allocator_memory import CpuMemoryMeter, memory_meter
from workbench.engine.measure.cuda_memory import CudaMemoryMeter


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def test_known_allocations_exactly() -> None:
    memory_meter = CpuMemoryMeter()
    memory_meter.start()
    a = block(1000)
    memory_meter.mark("one")
    b = block(5000)
    del a
    memory_meter.mark("two")
    c = block(300)
    del c
    memory_meter.mark("three")
    window = memory_meter.stop()
    assert (window.peak, window.end) == (6000, 5000)
    assert [(s.label, s.start, s.peak) for s in window.sections] == [
        ("one", 1000, 6000),
        ("two", 5000, 5300),
        ("three", 5000, 5000),
    ]
    assert window.at("two") == 5000
    assert window.peak_of("one") == 6000
    with pytest.raises(KeyError):
        window.at("four")
    del b


def test_later_windows_are_tied_at_a_mark() -> None:
    memory_meter = CpuMemoryMeter()
    memory_meter.start()
    kept = [block(4_000)]
    memory_meter.mark("step")
    kept.append(block(6_000))
    memory_meter.mark("step")
    scratch = block(500)
    assert memory_meter.stop().end == 10_500
    del scratch  # unseen, between the windows
    for size in (700, 900):
        memory_meter.start()
        earlier = block(64)
        del earlier
        memory_meter.mark("step")
        scratch = block(size)
        del scratch
        window = memory_meter.stop()
        assert (window.at("step"), window.peak_of("step"), window.end) == (
            10_000,
            10_000 + size,
            10_000,
        )
    del kept


def test_kept_block_is_subtracted_when_freed_in_a_later_window() -> None:
    memory_meter = CpuMemoryMeter()
    memory_meter.start()
    kept = block(10_000)
    memory_meter.mark("step")
    memory_meter.stop()
    memory_meter.start()
    memory_meter.mark("step")
    del kept
    assert memory_meter.stop().end == 0


def test_blocks_of_the_time_before_do_not_count() -> None:
    earlier = CpuMemoryMeter()
    earlier.start()
    kept = block(10_000)
    earlier.stop()
    memory_meter = CpuMemoryMeter()
    memory_meter.start()
    del kept
    again = block(300)
    window = memory_meter.stop()
    assert (window.peak, window.end) == (300, 300)
    del again


def test_an_unseen_free_is_mended_when_the_address_returns() -> None:
    """A process group's thread may drop the last reference; the profiler does not hear of it."""
    window = CpuMemoryMeter()._sum(
        [(1, None, 0x10, 100), (2, None, 0x20, 7), (3, None, 0x10, 50), (4, None, 0x10, -50)]
    )
    assert (window.peak, window.end) == (107, 7)


def test_training_step_against_storages_alive() -> None:
    """Linear → ReLU → Linear: forward and backward by hand from shapes."""
    memory_meter = CpuMemoryMeter()
    memory_meter.start()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32))
    parameters = sum(p.nbytes for p in model.parameters())
    x = torch.randn(128, 64)
    memory_meter.mark("step")
    y = model(x)
    memory_meter.mark("backward")
    y.backward(torch.ones_like(y))
    memory_meter.mark("done")
    window = memory_meter.stop()
    unit = 128 * 4
    assert window.at("step") == parameters + 64 * unit
    # ReLU keeps its output, which is also the next layer's input; Linear's own output is freed.
    assert window.at("backward") == parameters + 64 * unit + (256 + 32) * unit
    assert window.at("done") == 2 * parameters + (64 + 32) * unit


def test_meter_by_device() -> None:
    assert isinstance(memory_meter(torch.device("cpu")), CpuMemoryMeter)
    with pytest.raises(ValueError, match=r"cluster\.gpu: memory of a meta device"):
        memory_meter(torch.device("meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_counts_in_blocks() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    cuda = CudaMemoryMeter(device)
    cuda.start()
    cuda.begin_step()
    base = cuda.now()
    assert base is not None
    a = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    cuda.mark("one")
    b = torch.empty(4 << 20, dtype=torch.uint8, device=device)
    del b
    cuda.mark("two")
    counters = cuda.end_step(sampled=True)
    window = cuda.stop()
    assert window.at("one") - base == 1 << 20
    assert window.peak_of("one") - base == window.peak - base == 5 << 20
    assert window.peak_of("two") - base == window.end - base == 1 << 20
    assert counters.max_memory_allocated == window.peak
    assert counters.max_memory_reserved is not None
    assert counters.max_memory_reserved >= window.peak
    assert counters.num_alloc_retries == 0
    used = counters.process_memory_used
    assert used is None or used > counters.max_memory_reserved
    del a
