"""Single operators by the roofline: which limit binds, and what a phase takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.costmodel.compute.kernel_rates import device_rates, fused_attention, gemm_seconds
from workbench.costmodel.compute.operator_roofline import (
    Operator,
    compute_seconds,
    operator_seconds,
    operator_times,
)
from workbench.costmodel.rates.constants import constants
from workbench.machine import gpu_catalog

GPU = gpu_catalog.gpus()["h100-sxm-80gb"].gpu
M = device_rates(GPU, "bf16", constants(GPU, "eager"))
GEMM = Operator("mm", "gemm", "forward", (1, 4096, 4096, 4096), "bf16", 2 * 4096**3, 2**26, 2**25)
COPY = Operator("copy_", "memory", "forward", (2**28,), "bf16", 0, 2**29, 2**29)


def test_a_gemm_takes_what_the_estimates_takes_as_often_as_it_is_batched() -> None:
    one = gemm_seconds(M, 4096, 4096, 4096, 2)
    assert operator_seconds(GEMM, M, GPU, "bf16") == pytest.approx(float(one))
    batched = replace(GEMM, dims=(3, 4096, 4096, 4096))
    assert operator_seconds(batched, M, GPU, "bf16") == pytest.approx(3 * float(one))


def test_a_gemm_wider_than_the_plan_runs_at_its_own_rate() -> None:
    """A router's, in fp32: 67 of 989 TFLOP/s; a plan in TF32 has no narrower rate to leave."""
    wide = replace(GEMM, dtype="fp32")
    slower = operator_seconds(wide, M, GPU, "bf16") / operator_seconds(GEMM, M, GPU, "bf16")
    assert slower == pytest.approx(GPU.tflops["bf16"] / GPU.tflops["fp32"])
    tf32 = device_rates(GPU, "tf32", M.constants)
    assert operator_seconds(wide, tf32, GPU, "tf32") < operator_seconds(wide, M, GPU, "bf16") / 5


def test_a_causal_block_of_attention_is_the_estimates() -> None:
    flops = 2 * 2 * 16 * 2048**2 * 128
    block = Operator("a", "attention", "forward", (2, 16, 2048, 2048, 128), "bf16", flops, 1, 1)
    whole = fused_attention(M, flops, 128, 2048)
    assert operator_seconds(block, M, GPU, "bf16") == pytest.approx(float(whole.forward))
    back = replace(block, flops=flops * 5 // 2, backward=True, phase="backward")
    assert operator_seconds(back, M, GPU, "bf16") == pytest.approx(float(whole.backward))


def test_each_operator_says_what_binds_it() -> None:
    thin = replace(GEMM, dims=(1, 4096, 4096, 32), flops=2**30, read=2**19, written=2**25)
    small = replace(COPY, dims=(8,), read=16, written=16)
    calls = [(GEMM, 1), (COPY, 1), (thin, 1), (small, 1)]
    quick = replace(M, constants=replace(M.constants, launch_us=1.0, gemm_half_dim=0.0))
    bounds = {t.operator: t.bound for t in operator_times(calls, 0, quick, GPU, "bf16")}
    assert bounds == {GEMM: "compute", COPY: "memory", thin: "memory", small: "launch"}


def test_a_phase_takes_its_kernels_or_its_launches() -> None:
    small = replace(COPY, dims=(8,), read=16, written=16)
    launch = 1e-6 * M.constants.launch_us
    many = operator_times([(small, 1000)], 0, M, GPU, "bf16")
    assert compute_seconds(many, M) == pytest.approx(1000 * launch)
    hidden = operator_times([(small, 1000), (GEMM, 1000)], 0, M, GPU, "bf16")
    assert compute_seconds(hidden, M) == pytest.approx(sum(t.seconds for t in hidden))
    after = operator_times([(replace(COPY, phase="optimizer"), 1)], 0, M, GPU, "bf16")
    assert compute_seconds(after, M) == 0 < after[0].seconds


def test_a_row_counts_all_calls() -> None:
    (one,) = operator_times([(GEMM, 3)], 5, M, GPU, "bf16")
    row = one.row()
    assert (row["rank"], row["count"], row["flops"]) == (5, 3, 6 * 4096**3)
    assert row["bytes_read"] + row["bytes_written"] == 3 * (2**26 + 2**25)
    assert row["intensity"] == GEMM.flops / GEMM.bytes
