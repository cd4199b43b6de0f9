"""The grouped GEMM of experts: one kernel where the GPU has it, one GEMM a group elsewhere."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.models import grouped_gemm
from workbench.models.grouped_gemm import (
    GroupedLinear,
    RowGroups,
    has_grouped_kernel,
    torch_has_kernel,
)
from workbench.models.moe import MoE
from workbench.plan.schema import Plan
from workbench.planned_device import REHEARSED_GPU
from workbench.rehearsal.fake_process_group import fake_tensors

COUNTS = [5, 0, 1, 10]


def groups(counts: Sequence[int] = COUNTS) -> RowGroups:
    return RowGroups(torch.tensor(counts), lambda: list(counts))


def refuse() -> list[Any]:
    raise AssertionError("the host waits for the device")


def results(layer: GroupedLinear, x: Tensor, rows: RowGroups, weight: Tensor) -> tuple[Any, ...]:
    y = layer(x, rows)
    return y.detach(), *torch.autograd.grad((y * weight).sum(), (x, layer.weight))


def test_one_kernel_computes_what_a_gemm_a_group_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch runs the grouped kernel on CPU too, group by group; a group without rows has a zero
    gradient.
    """
    generator = torch.Generator().manual_seed(0)
    layer = GroupedLinear(4, 16, 8, bias=False).bfloat16()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(4, 8, 16, generator=generator))
    x = torch.randn(16, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(16, 8, generator=generator).bfloat16()
    expected = results(layer, x, groups(), weight)
    monkeypatch.setattr(grouped_gemm, "on_gpu", lambda x: True)
    found = results(layer, x, RowGroups(torch.tensor(COUNTS), refuse), weight)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    assert not found[2][1].any() and found[2][0].any()


@pytest.mark.parametrize(
    ("dtype", "device", "width", "expected"),
    [
        (torch.bfloat16, REHEARSED_GPU, 16, True),
        (torch.bfloat16, REHEARSED_GPU, 12, False),
        (torch.float32, REHEARSED_GPU, 16, False),
        (torch.bfloat16, torch.device("cpu"), 16, False),
    ],
    ids=str,
)
def test_where_the_kernel_runs(
    dtype: torch.dtype, device: torch.device, width: int, expected: bool
) -> None:
    with fake_tensors():
        x = torch.empty(4, width, dtype=dtype, device=device)
        weight = torch.empty(2, 8, width, dtype=dtype, device=device)
        assert has_grouped_kernel(x, weight) is expected


@pytest.mark.parametrize(
    ("major", "version", "expected"),
    [
        (8, "2.13.0", False),
        (9, "2.11.0+cu130", True),
        (10, "2.12.1", False),
        (10, "2.13.0", True),
        (12, "2.13.0", False),
    ],
)
def test_gpus_without_the_kernel_get_a_gemm_a_group(
    major: int, version: str, expected: bool
) -> None:
    """torch's own loop would wait for the counts, which ours reads behind the gather."""
    assert torch_has_kernel(major, version) is expected


@pytest.fixture
def in_bf16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("in_bf16")
def test_experts_on_a_gpu_make_the_host_wait_for_nothing() -> None:
    """Forward and backward of a whole MoE layer whose counts nobody may read."""
    model = {"layers": 2, "hidden": 16, "heads": 2, "ffn": 32, "vocab": 256}
    moe = {"experts": 4, "top_k": 2, "ffn": 16}
    shape = (
        Plan.of("tiny", gpu="local", gpus=1, set={"model": model | {"moe": moe}}).resolve().shape
    )
    with fake_tensors(), torch.device(REHEARSED_GPU):
        layer = MoE(shape, None)
        layer.dispatcher.read_counts = lambda counts, total, index=0, ranks=1: refuse
        x = torch.zeros(2, 8, 16, requires_grad=True)
        y, aux_loss = layer(x)
        (y.sum() + (0 if aux_loss is None else aux_loss)).backward()
        assert x.grad is not None
