"""GEMMs of weight gradients that add to the accumulated ones themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workbench.costmodel.compute.kernel_rates import DeviceRates, device_rates, gemm_seconds
from workbench.costmodel.compute.roofline import layer_pass, layer_times, microbatch_compute
from workbench.costmodel.inputs.rank_workload import Workload, workload
from workbench.costmodel.rates.constants import constants
from workbench.plan.schema import Plan

FP32 = 4


def setting(stack: str, **changed: Any) -> tuple[Workload, DeviceRates]:
    dotted = {path.replace("__", "."): value for path, value in changed.items()}
    plan = Plan.of(
        "llama-3-8b",
        gpu="a100-sxm-80gb",
        gpus=8,
        strategy="ddp",
        set={"strategy.stack": stack, **dotted},
    ).resolve()
    return workload(plan), device_rates(plan.gpu, "bf16", constants(plan.gpu, "fused", stack))


def test_what_is_added_to_moves_beside_the_products() -> None:
    """One kernel's roofline: the accumulated gradient is read and written in its epilogue, which
    costs nothing where the products take longer, and all where they do not.
    """
    _, m = setting("megatron")
    long, short = ((14336, 4096, tokens) for tokens in (8192, 16))
    assert gemm_seconds(m, *long, 2, result=2 * FP32) == gemm_seconds(m, *long, 2)
    rows, columns, tokens = short
    moved = rows * columns * 2 * FP32 + (rows + columns) * tokens * 2
    assert gemm_seconds(m, *short, 2, result=2 * FP32) == pytest.approx(moved / m.bandwidth)


@pytest.mark.parametrize(("stack", "apart"), [("megatron-2022", False), ("megatron-2021", True)])
def test_only_gradients_of_their_own_are_accumulated_apart(stack: str, apart: bool) -> None:
    """Of GEMMs that accumulate, the embedding's gradient is left."""
    w, m = setting(stack, training__global_batch=64, strategy__gradient_dtype="fp32")
    assert w.microbatches > 1
    k = layer_times(w, m)
    layers = (
        w.layers * k.dense.backward + k.head.backward + 4 / m.bandwidth * w.hidden_activation_bytes
    )
    added = float(np.max(microbatch_compute(w, m, k).backward - layers))
    parameters = float(np.max(w.param_counts.total)) if apart else float(w.table_params)
    assert added == pytest.approx(parameters * (2 * FP32 + 2) / m.bandwidth)


@pytest.mark.parametrize(("precision", "stored"), [("bf16", 4), ("fp16", 2)])
def test_gradients_are_added_to_the_buffer_that_accumulates(precision: str, stored: int) -> None:
    """DeepSpeed's BF16_Optimizer adds each microbatch's gradients to fp32 ones; in fp16 runs the
    parameters' own gradients accumulate.
    """
    w, m = setting("deepspeed-3d", training__global_batch=64, strategy__precision=precision)
    k = layer_times(w, m)
    layers = (
        w.layers * k.dense.backward + k.head.backward + 4 / m.bandwidth * w.hidden_activation_bytes
    )
    added = float(np.max(microbatch_compute(w, m, k).backward - layers))
    parameters = float(np.max(w.param_counts.total))
    assert added == pytest.approx(parameters * (2 * stored + 2) / m.bandwidth)


def test_a_layer_with_few_tokens_is_bound_by_the_gradients_it_adds_to() -> None:
    few = {"training__sequence_length": 64, "training__micro_batch": 1}
    (w, m), (other, n) = setting("megatron-2022", **few), setting("megatron-2021", **few)
    assert layer_pass(w, m, False).weight_grad > 1.5 * layer_pass(other, n, False).weight_grad
