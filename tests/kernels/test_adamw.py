"""AdamW's reference is torch's, and its kernel's tensors are checked by name before any address is
taken.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.adamw import adamw as torch_adamw

from workbench.kernels.adamw import AdamWTensor, FusedAdamW, reference
from workbench.kernels.backends.triton_compat import triton

needs_triton = pytest.mark.skipif(triton is None, reason="without Triton no tensor is legal")


def test_reference_is_torchs_adamw() -> None:
    torch.manual_seed(0)
    mine = [
        torch.randn(50, dtype=torch.float64),
        *(torch.zeros(50, dtype=torch.float64) for _ in range(2)),
    ]
    theirs, steps = [x.clone() for x in mine], torch.zeros(())
    for step in range(1, 5):
        gradient = torch.randn(50, dtype=torch.float64)
        mine[:] = reference(mine[0], gradient, *mine[1:], step, 1e-2, 0.9, 0.95, 1e-8, 0.1)
        torch_adamw(
            theirs[:1],
            [gradient],
            theirs[1:2],
            theirs[2:],
            [],
            [steps],
            fused=True,
            foreach=False,
            amsgrad=False,
            maximize=False,
            lr=1e-2,
            weight_decay=0.1,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
        )
        for x, y in zip(mine, theirs):
            torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-14)


def stepped(device: str = "cuda", **changes: Any) -> AdamWTensor:
    """A bf16 tensor with a master that nothing is wrong with, but for `changes`."""
    wide = {name: torch.empty(8, 3, device=device) for name in ("moment1", "moment2", "master")}
    narrow = {
        name: torch.empty(8, 3, device=device, dtype=torch.bfloat16)
        for name in ("parameter", "gradient")
    }
    whole = {**wide, **narrow, "steps": torch.empty((), device=device), "decay": 0.1, **changes}
    return AdamWTensor(**whole)


@needs_triton
def test_nothing_has_an_address_among_fake_tensors() -> None:
    with FakeTensorMode():
        own = [
            stepped(),
            stepped(),
            stepped(master=None),
            stepped(gradient=torch.empty(8, 3, device="cuda")),
        ]
        optimizer = FusedAdamW(own, 0.9, 0.95, 1e-8)
        assert [len(launch.targets) for launch in optimizer._launches] == [
            2,
            1,
            1,
        ]  # one for each kind of dtypes
        optimizer.step(1e-3)
        optimizer.step(1e-3, torch.ones((), device="cuda"), torch.zeros((), device="cuda"))


@needs_triton
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("moment1", lambda: torch.empty(8, 3), "moment1 is on cpu, but parameter on cuda"),
        ("gradient", lambda: on_gpu(8, 4), r"gradient has shape \(8, 4\); legal: \(8, 3\)"),
        ("gradient", lambda: on_gpu(8, 3).long(), "gradient is int64; legal: float64"),
        (
            "gradient",
            lambda: on_gpu(8, 3).to(torch.complex64),
            "gradient is complex64; legal: float64",
        ),
        ("steps", lambda: on_gpu(1), r"steps has shape \(1,\); legal: \(\)"),
        ("steps", lambda: on_gpu().double(), "steps is float64; legal: float32"),
        ("moment2", lambda: on_gpu(8, 3).bfloat16(), "moment2 is bfloat16; legal: float32"),
        ("master", lambda: on_gpu(3, 8).t(), r"master has strides \(1, 8\); legal: contiguous"),
    ],
)
def test_illegal_arguments_are_refused_by_name(
    name: str, value: Callable[[], Tensor], message: str
) -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match=f"adamw: {message}"):
        FusedAdamW([stepped(), stepped(**{name: value()})], 0.9, 0.95, 1e-8)


def on_gpu(*shape: int) -> Tensor:
    return torch.empty(shape, device="cuda")


def test_a_device_without_triton_is_refused() -> None:
    with pytest.raises(ValueError, match="adamw: parameter is on cpu; legal: where Triton runs"):
        FusedAdamW([stepped("cpu")], 0.9, 0.95, 1e-8)
