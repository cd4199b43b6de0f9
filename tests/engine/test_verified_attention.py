"""Attention kernels of a verification on GPUs: each takes the dtype that it is given there."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.parts import nccl_ranks
from tests.parallel.small import LLAMA, plan
from workbench.engine.verify.drawn_batches import random_batches
from workbench.engine.verify.equivalence import in_precision, replaced_fields, verified_dtype
from workbench.engine.verify.single_device import train_on_one_device
from workbench.engine.verify.verified_attention import attention_of_reference
from workbench.models.attention import attention_kernels as kernels_of_models
from workbench.plan.model.attention_kernel import attention_kernels
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

GPU = torch.device("cuda", 0)
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def takes(full: ResolvedPlan, kernel: str, dtype: torch.dtype) -> bool:
    """Whether the plan's GPU has the kernel for tensors of that dtype."""
    if dtype == torch.float64:
        return kernel == "math"
    return kernel in attention_kernels(full.gpu, NAMES[dtype], int(full.shape.head_dim or 0))


def on_gpu(gpu: str, **changes: Any) -> Plan:
    wide = {"hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 128}
    return plan(2, shape=LLAMA | wide).replace(**{"cluster.gpu": gpu} | changes)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("head_dim", [32, 20, 6])
@pytest.mark.parametrize("gpu", ["h100-sxm-80gb", "a100-sxm-80gb", "t4"])
def test_ranks_and_one_device_have_a_kernel_for_their_dtype(
    gpu: str, head_dim: int, precision: str
) -> None:
    written = on_gpu(gpu, **{"model.head_dim": head_dim, "strategy.tensor.size": 1})
    written = written.replace(**{"strategy.data.zero": 1})
    if (gpu, precision) == ("t4", "bf16"):
        pytest.skip("no bf16 there")
    if precision == "fp8":
        if gpu != "h100-sxm-80gb" or head_dim != 32:
            pytest.skip("no fp8 GEMMs there")
        written = written.replace(**{"strategy.precision": "fp8"})
    full = in_precision(written.resolve(), precision, False, on_plans_device=True)
    dtype = verified_dtype(precision, GPU)
    assert takes(full, full.strategy.attention, dtype)
    for each in (dtype, torch.float64):
        assert takes(full, attention_of_reference(full, each, GPU), each)
    assert Plan.model_validate(full.model_dump()).resolve() == full  # as a rank reads it


def test_a_kernel_that_is_replaced_is_reported() -> None:
    written = on_gpu("h100-sxm-80gb", **{"strategy.attention": "flash"}).resolve()
    full = in_precision(written, "fp32", False, on_plans_device=True)
    replaced = replaced_fields(written, full, "fp32", on_gpu=True)
    assert replaced["strategy.attention"] == {"plan": "flash", "verified": "efficient"}
    on_cpu = in_precision(written, "fp32", False)
    assert "strategy.attention" not in replaced_fields(written, on_cpu, "fp32")


@pytest.mark.parametrize("name", nccl_ranks.EQUAL)
def test_plans_of_gpu_check_have_a_kernel_for_fp32(name: str) -> None:
    written = nccl_ranks.EQUAL[name].replace(**{"cluster.gpu": "h100-sxm-80gb"}).resolve()
    full = in_precision(written, "fp32", False, on_plans_device=True)
    assert written.strategy.precision == "bf16"
    assert full.code or takes(full, full.strategy.attention, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_one_device_calls_the_kernel_that_it_was_given(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's branch, on CPU tensors."""
    full = in_precision(on_gpu("h100-sxm-80gb").resolve(), "fp32", False, on_plans_device=True)
    called: set[tuple[str, torch.dtype]] = set()
    forward = kernels_of_models.attention

    def attention(kernel: str, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        called.add((kernel, q.dtype))
        return forward("math", q, k, v, scale)

    monkeypatch.setattr("workbench.models.seams.attention", attention)
    kernel = attention_of_reference(full, dtype, GPU)
    train_on_one_device(full, list(random_batches(full))[:1], dtype, attention=kernel)
    assert called == {("efficient" if dtype == torch.float32 else "math", dtype)}
