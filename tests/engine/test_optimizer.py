"""The optimizer equals torch's, keeps master weights, and needs no values."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from workbench.engine.optimizer.mixed_precision_optimizer import MixedPrecisionOptimizer
from workbench.engine.precision import plan_dtypes
from workbench.errors import PlanError
from workbench.kernels.backends.triton_compat import triton
from workbench.parallel.layout import Layout
from workbench.plan import schema
from workbench.plan.learning_rate import learning_rate
from workbench.plan.optimizer_state import state_bytes
from workbench.plan.schema import Plan

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (7, 5), "vector": (11,), "other": (3, 4, 2)}
LAYOUTS = {name: Layout.unsharded(name, shape) for name, shape in SHAPES.items()}


def named(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {
        n: nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype))
        for n, s in SHAPES.items()
    }


def gradients_of(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {
        n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)
        for n, s in SHAPES.items()
    }


def fill(into: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    for name, value in values.items():
        into[name].copy_(value)


def config(**changes: Any) -> schema.Optimizer:
    return schema.Optimizer.model_validate({"learning_rate": 1e-2, "decay": "constant", **changes})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_equals_torch(dtype: torch.dtype, name: str) -> None:
    settings = config(name=name)
    ours, theirs = named(dtype), named(dtype)
    gradients = gradients_of(0, dtype)
    optimizer = MixedPrecisionOptimizer(ours, gradients, LAYOUTS, settings, 10)
    groups = [
        {"params": [p for p in theirs.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if name == "adamw":
        reference: torch.optim.Optimizer = torch.optim.AdamW(
            groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False
        )
    else:
        reference = torch.optim.SGD(
            [{**g, "weight_decay": 0.0} for g in groups], lr=1e-2, momentum=0.9, foreach=False
        )
    for step in range(4):
        fill(gradients, gradients_of(step, dtype))
        for key, parameter in theirs.items():
            parameter.grad = gradients_of(step, dtype)[key] * 0.5
            if name == "sgd" and parameter.ndim >= 2:
                parameter.data.mul_(1 - 1e-2 * 0.1)
        reference.step()
        optimizer.step(step, torch.tensor(0.5))
    for key, parameter in ours.items():
        torch.testing.assert_close(
            parameter, theirs[key], rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-7
        )
    assert all(float(entry["step"]) == 4 for entry in optimizer.state().values())


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_master_follows_fp32_and_parameter_rounds_it(gradient_dtype: torch.dtype) -> None:
    small, wide = (
        named(torch.bfloat16),
        {n: nn.Parameter(p.detach().float()) for n, p in named(torch.bfloat16).items()},
    )
    narrow = gradients_of(0, gradient_dtype)
    full = {n: g.float().clone() for n, g in narrow.items()}
    ours, reference = (
        MixedPrecisionOptimizer(small, narrow, LAYOUTS, config(learning_rate=1e-4), 10),
        MixedPrecisionOptimizer(wide, full, LAYOUTS, config(learning_rate=1e-4), 10),
    )
    for step in range(5):
        fill(narrow, gradients_of(step, gradient_dtype))
        fill(full, gradients_of(step, gradient_dtype))
        ours.step(step, torch.tensor(0.7))
        reference.step(step, torch.tensor(0.7))
    for name, parameter in small.items():
        state = ours.state()[name]
        assert state["master"].dtype == state["moment1"].dtype == torch.float32
        torch.testing.assert_close(state["master"], wide[name].detach(), rtol=0, atol=0)
        assert torch.equal(parameter.detach(), state["master"].bfloat16())


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("master", ["auto", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_state_is_torchs_rounded_after_every_step(
    dtype: torch.dtype, master: str, moments: str, name: str
) -> None:
    settings = config(name=name, moments=moments, master=master)
    ours, gradients = named(dtype), gradients_of(0, dtype)
    wide = {n: p.detach().float() for n, p in ours.items()}
    optimizer = MixedPrecisionOptimizer(ours, gradients, LAYOUTS, settings, 10)
    kinds = {
        "adamw": {"moment1": "exp_avg", "moment2": "exp_avg_sq"},
        "sgd": {"moment1": "momentum_buffer"},
    }[name]
    theirs = {
        n: torch.optim.AdamW(
            [p], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1 * (p.ndim > 1), fused=True
        )
        if name == "adamw"
        else torch.optim.SGD([p], lr=1e-2, momentum=0.9, fused=True)
        for n, p in wide.items()
    }
    for step in range(4):
        fill(gradients, gradients_of(step, dtype))
        for n, p in wide.items():
            p.grad = gradients[n].float()
            if name == "sgd" and p.ndim > 1:
                p.mul_(1 - 1e-2 * 0.1)
            theirs[n].step()
            if master == "none":
                p.copy_(p.to(dtype))
            for theirs_kind in kinds.values():
                if moments == "bf16":
                    theirs[n].state[p][theirs_kind].copy_(
                        theirs[n].state[p][theirs_kind].bfloat16()
                    )
        optimizer.step(step)
        for n, p in wide.items():
            state = optimizer.state()[n]
            assert ("master" in state) == (master == "auto") and torch.equal(
                ours[n].detach(), p.to(dtype)
            ), n
            assert all(
                torch.equal(state[o].float(), theirs[n].state[p][t]) for o, t in kinds.items()
            ), n
            assert (
                state["moment1"].dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[moments]
            )


def test_casting_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for limit in (1, 2**30):
        monkeypatch.setattr(
            "workbench.engine.optimizer.optimizer_groups.OPTIMIZER_CAST_BYTES", limit
        )
        parameters = named(torch.bfloat16)
        optimizer = MixedPrecisionOptimizer(
            parameters, gradients_of(0, torch.bfloat16), LAYOUTS, config(), 3
        )
        assert len(optimizer._groups) == (
            3 if limit == 1 else 2
        )  # matrices and vectors are decayed apart
        optimizer.step(0, None)
        results.append(parameters)
    assert all(torch.equal(results[0][n], results[1][n]) for n in SHAPES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_runs_on_fake_tensors(dtype: torch.dtype, name: str) -> None:
    with FakeTensorMode():
        parameters = {n: nn.Parameter(torch.empty(s, dtype=dtype)) for n, s in SHAPES.items()}
        gradients = {n: torch.empty(s, dtype=torch.float32) for n, s in SHAPES.items()}
        optimizer = MixedPrecisionOptimizer(parameters, gradients, LAYOUTS, config(name=name), 3)
        optimizer.step(0, torch.ones(()))
        optimizer.step(1, torch.ones(()), torch.zeros(()))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_fused_kernels_change_nothing_where_triton_does_not_run(name: str) -> None:
    found = []
    for kernels in ("eager", "compiled", "fused"):
        parameters, gradients = named(torch.bfloat16), gradients_of(0, torch.bfloat16)
        optimizer = MixedPrecisionOptimizer(
            parameters, gradients, LAYOUTS, config(name=name), 10, kernels
        )
        optimizer.step(0, torch.tensor(0.5))
        found.append(
            [*parameters.values(), *(x for own in optimizer.state().values() for x in own.values())]
        )
    assert all(
        torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True)
    )
    assert not torch.equal(found[0][0], named(torch.bfloat16)["matrix"])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("master", ["auto", "none"])
def test_splitting_upcast_tensors_changes_nothing(
    name: str, master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "workbench.engine.optimizer.mixed_precision_optimizer.CPU_FUSED_CAST_BYTES", 1024
    )
    shapes = {"matrix": (40, 20), "vector": (130,), "small": (3, 4)}
    layouts = {n: Layout.unsharded(n, s) for n, s in shapes.items()}
    found = []
    for kernels in ("eager", "fused"):
        generator = torch.Generator().manual_seed(0)
        own, given = (
            {n: torch.randn(s, generator=generator).bfloat16() for n, s in shapes.items()}
            for _ in range(2)
        )
        settings = config(name=name, master=master, moments="fp32")
        optimizer = MixedPrecisionOptimizer(own, given, layouts, settings, 10, kernels)
        assert len(optimizer._groups) >= 4 if kernels == "fused" else len(optimizer._groups) == 2
        for step, skip in enumerate((0.0, 1.0, 0.0)):
            for x in given.values():
                x.copy_(torch.randn(x.shape, generator=generator))
            optimizer.step(step, torch.tensor(0.5), torch.tensor(skip))
        found.append(
            [*own.values(), *(x for state in optimizer.state().values() for x in state.values())]
        )
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert all(float(state["step"]) == 2 for state in optimizer.state().values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_a_gpu_runs_on_fake_tensors(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        parameters = {n: torch.empty(s, dtype=dtype, device="cuda") for n, s in SHAPES.items()}
        gradients = {n: torch.empty_like(p) for n, p in parameters.items()}
        optimizer = MixedPrecisionOptimizer(parameters, gradients, LAYOUTS, config(), 3, "fused")
        assert (optimizer._fused is None) == (triton is None)
        optimizer.step(0, torch.ones((), device="cuda"))
        optimizer.step(1, torch.ones(()), torch.zeros(()))


def test_state_loads_exactly_and_refuses_others() -> None:
    first, gradients = named(torch.float32), gradients_of(0, torch.float32)
    optimizer = MixedPrecisionOptimizer(first, gradients, LAYOUTS, config(), 10)
    optimizer.step(0)
    second = {n: nn.Parameter(p.detach().clone()) for n, p in first.items()}
    other = MixedPrecisionOptimizer(second, gradients_of(1, torch.float32), LAYOUTS, config(), 10)
    other.load(optimizer.state())
    fill(gradients, gradients_of(1, torch.float32))
    optimizer.step(1)
    other.step(1)
    assert all(torch.equal(first[n], second[n]) for n in SHAPES)
    state = {n: dict(entry) for n, entry in optimizer.state().items()}
    state["vector"]["moment2"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"moment2 of vector: shape \(3,\), needs \(11,\)"):
        other.load(state)
    del state["vector"]["moment2"]
    with pytest.raises(ValueError, match="optimizer state of vector"):
        other.load(state)


def test_learning_rate_schedule() -> None:
    cosine = schema.Optimizer(learning_rate=1.0, warmup_steps=4, decay="cosine", final_ratio=0.1)
    assert [learning_rate(s, cosine, 14) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(4, cosine, 14) == 1.0
    assert math.isclose(learning_rate(13, cosine, 14), 0.1)
    assert math.isclose(learning_rate(7, cosine, 14), 0.1 + 0.9 * (1 + math.cos(math.pi / 3)) / 2)
    linear = cosine.model_copy(update={"decay": "linear"})
    assert math.isclose(learning_rate(7, linear, 14), 0.1 + 0.9 * (1 - 3 / 9))
    constant = cosine.model_copy(update={"decay": "constant"})
    assert learning_rate(13, constant, 14) == 1.0
    assert learning_rate(0, schema.Optimizer(), 1) == 3e-4


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("master", ["auto", "none"])
@pytest.mark.parametrize(
    "changes", [{}, {"name": "sgd"}, {"name": "sgd", "beta1": 0.0}], ids=["adamw", "sgd", "plain"]
)
def test_preflight_counts_the_bytes_that_are_there(
    precision: str, moments: str, master: str, changes: dict[str, object]
) -> None:
    optimizer = {"moments": moments, "master": master, **changes}
    written = {f"training.optimizer.{key}": value for key, value in optimizer.items()}
    try:
        plan = Plan.of(
            "tiny", gpu="h100-sxm-80gb", gpus=1, set={"strategy.precision": precision, **written}
        ).resolve()
    except PlanError:
        pytest.skip("no legal plan")
    stored, gradient = plan_dtypes(plan)
    values = named(stored)
    given = gradients_of(0, gradient)
    state = MixedPrecisionOptimizer(values, given, LAYOUTS, plan.training.optimizer, 10).state()
    kept = sum(
        tensor.nbytes for own in state.values() for kind, tensor in own.items() if kind != "step"
    )
    count = sum(value.numel() for value in values.values())
    each = state_bytes(plan)
    sizes = each.parameter, each.gradient, each.optimizer
    assert sizes == (stored.itemsize, gradient.itemsize, kept / count)
