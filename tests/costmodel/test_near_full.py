"""A nearly full GPU: the allocator's retries are priced where they are likely, and nowhere else."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from workbench.costmodel.memory import near_full
from workbench.costmodel.memory.reported_memory import peak_memory_sigma
from workbench.costmodel.rates.constants import Constants, constants
from workbench.costmodel.rates.fitted_memory import published_memory_fit
from workbench.machine import gpu_catalog

GIB = 2**30
CAPACITY = 80.0 * GIB


@pytest.fixture(autouse=True)
def slow_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_full, "retry_slowdown", lambda: 4.0)


def on_gpu(stack: str = "megatron", name: str = "a100-sxm-80gb") -> Constants:
    return constants(gpu_catalog.gpus()[name].gpu, "eager", stack)


def test_the_region_begins_where_the_allocators_slack_no_longer_fits() -> None:
    k = on_gpu()
    begins, kept = (near_full.retry_region(CAPACITY, k), published_memory_fit().slack)
    allocated = begins / (1 + k.fragmentation)
    assert allocated * (1 + kept) == pytest.approx(CAPACITY)
    assert 0.9 * CAPACITY < begins < CAPACITY


@pytest.mark.parametrize("stack", ["megatron", "textbook"])
def test_the_expectation_is_the_share_of_needs_beyond_it_by_drawing(stack: str) -> None:
    k, draw = on_gpu(stack), np.random.default_rng(0)
    spread = peak_memory_sigma(stack)
    for share in (0.7, 0.85, 0.95):
        needs = share * CAPACITY * np.exp(spread * draw.standard_normal(400_000))
        runs = needs[needs <= CAPACITY]
        drawn = 1 + 3 * np.mean(runs > near_full.retry_region(CAPACITY, k))
        said = near_full.near_full_slowdown(share * CAPACITY, CAPACITY, stack, k)
        assert said == pytest.approx(drawn, abs=0.02)


def test_it_grows_with_the_peak_from_nothing_to_the_whole() -> None:
    k = on_gpu()
    shares = (0.05, 0.5, 0.8, 0.9, 1.0, 1.2, 3.0)
    each = [near_full.near_full_slowdown(s * CAPACITY, CAPACITY, "megatron", k) for s in shares]
    assert each == sorted(each)
    assert each[:2] == pytest.approx([1.0, 1.0], abs=1e-6)
    assert 3.0 < each[-2] <= each[-1] <= 4.0


def test_without_a_caching_allocator_nothing_retries() -> None:
    arena = dataclasses.replace(on_gpu(), fragmentation=0.0)
    assert near_full.near_full_slowdown(0.95 * CAPACITY, CAPACITY, "llmq", arena) == 1.0
    assert on_gpu("llmq").fragmentation == 0


def test_a_search_interpolates_the_same() -> None:
    k = on_gpu()
    peaks, slowdowns = near_full.slowdown_table(CAPACITY, "megatron", k)
    for share in np.linspace(0.3, 1.5, 101):
        one = near_full.near_full_slowdown(share * CAPACITY, CAPACITY, "megatron", k)
        assert np.interp(math.log(share * CAPACITY), peaks, slowdowns) == pytest.approx(
            one, rel=1e-4
        )
